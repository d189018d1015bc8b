"""Errors across processes: the class, the text and the fields, whoever sends them."""

from __future__ import annotations

import json

import pytest

from gpusync.endpoint import RemoteError, error_as_dict, error_from_dict
from gpusync.errors import ChainError, GpusyncError, MissingLinkError, PeerFailedError, VersionMissingError
from gpusync.verdict import InDoubtError
from gpusync.verdict.errors import GroupFailedError


def sent(error: Exception) -> GpusyncError:
    return error_from_dict(json.loads(json.dumps(error_as_dict(error))))


@pytest.mark.parametrize(
    "error",
    [
        VersionMissingError("not there", path="/s/weight_v000007", version=7, expected=10, found=4.5),
        MissingLinkError("gone", version=3, tensor="a", expected=(1, 2)),
        PeerFailedError("failed", ranks={0: "a", 11: "b"}),
        GroupFailedError("ranks did not come", missing=(1, 3)),
    ],
)
def test_an_error_is_what_it_was(error: GpusyncError) -> None:
    found = sent(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    expected = vars(error) | ({"expected": str(error.expected)} if isinstance(error.expected, tuple) else {})
    assert vars(found) == expected


def test_of_a_class_that_is_not_known_the_nearest_one_that_is() -> None:
    told = error_as_dict(MissingLinkError("gone")) | {"type": ["NewerError", "ChainError", "GpusyncError"]}
    assert type(error_from_dict(told)) is ChainError


def test_in_doubt_is_told_from_other_failures() -> None:
    assert isinstance(sent(InDoubtError("not learned", transaction="t", phase="commit")), InDoubtError)


def test_what_is_no_error_of_ours_keeps_its_text_on_one_line() -> None:
    found = sent(ValueError("two\nlines"))
    assert type(found) is RemoteError
    assert str(found) == "ValueError: two lines"


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"type": "GpusyncError"},
        {"type": [["nested"], 5, None]},
        {"type": ["PeerFailedError"], "message": 5, "ranks": {"x": 1, "2": None}},
        {"type": ["Exception", "SystemExit", "object"]},
    ],
)
def test_facts_of_a_server_that_is_not_ours_make_an_error_too(told: dict[str, object]) -> None:
    assert isinstance(error_from_dict(told), GpusyncError)
