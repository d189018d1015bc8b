"""Every field of a request: what is taken, and what is refused in one line that names the field."""

from __future__ import annotations

import pytest

from gpusync.endpoint.errors import RequestError
from gpusync.endpoint.messages import AbortRequest, CommitRequest, PullRequest, parse_abort, parse_commit, parse_pull


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"target_version": 0}', PullRequest(target_version=0)),
        (
            b'{"local_checkpoint_dir": "/l", "source_dir": "/s", "target_version": 7}',
            PullRequest(target_version=7, source_dir="/s", local_checkpoint_dir="/l"),
        ),
        (b'{"target_version": 7, "commit": true}', PullRequest(target_version=7, commit=True)),
        (b'{"target_version": 1000000000000}', PullRequest(target_version=10**12)),
        (b'{"target_version": 7, "a_field_of_the_future": [1]}', PullRequest(target_version=7)),
    ],
)
def test_a_pull_is_read(body: bytes, expected: PullRequest) -> None:
    assert parse_pull(body) == expected


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "target_version is missing"),
        (b"{}", "target_version is missing"),
        (b"[]", "not a JSON object; found list"),
        (b"7", "not a JSON object; found int"),
        (b"{", "request is not JSON"),
        (b"\xff\xfe", "request is not JSON"),
        (b'{"target_version": NaN}', "a number that JSON does not have"),
        (b'{"target_version": 1, "target_version": 2}', "holds a key twice"),
        (b"[" * 100_000, "request is"),
        (b'{"target_version": "7"}', "target_version is not a version number"),
        (b'{"target_version": true}', "target_version is not a version number"),
        (b'{"target_version": 7.0}', "target_version is not a version number"),
        (b'{"target_version": -1}', "target_version is not a version number"),
        (b'{"target_version": 1000000000001}', "target_version is not a version number"),
        (b'{"target_version": ' + b"9" * 5000 + b"}", "request is not JSON"),
        (b'{"target_version": 1, "source_dir": 5}', "source_dir is not a path"),
        (b'{"target_version": 1, "source_dir": ""}', "source_dir is not a path"),
        (b'{"target_version": 1, "source_dir": "/a\\u0000b"}', "source_dir is not a path"),
        (b'{"target_version": 1, "source_dir": "/\\ud800"}', "text that is not Unicode"),
        (b'{"target_version": 1, "source_dir": "/' + b"a" * 5000 + b'"}', "source_dir is not a path"),
        (b'{"target_version": 1, "local_checkpoint_dir": ["/l"]}', "local_checkpoint_dir is not a path"),
        (b'{"target_version": 1, "commit": 1}', "commit is neither true nor false"),
        (b'{"target_version": 1, "commit": null}', "commit is neither true nor false"),
    ],
)
def test_a_pull_that_is_wrong_is_refused_in_one_line(body: bytes, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_pull(body)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_commit_names_its_version() -> None:
    assert parse_commit(b'{"target_version": 3}') == CommitRequest(target_version=3)
    with pytest.raises(RequestError, match="target_version is missing"):
        parse_commit(b"{}")


def test_an_abort_may_name_one() -> None:
    assert parse_abort(b"") == AbortRequest(target_version=None)
    assert parse_abort(b'{"target_version": 3}') == AbortRequest(target_version=3)
