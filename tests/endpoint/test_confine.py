"""A request cannot name a directory outside the roots, however it is spelt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusync.endpoint import ForbiddenPathError, confine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "run" / "deep").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "root-of-another").mkdir()
    return tmp_path / "root"


@pytest.mark.parametrize("inside", ["", "run", "run/deep/..", "not/there/yet", "run/./deep", "run//deep"])
def test_what_lies_below_a_root_is_allowed_and_resolved(root: Path, inside: str) -> None:
    found = confine(f"{root}/{inside}", [root], what="source_dir")
    assert found == Path(os.path.realpath(root / inside))


@pytest.mark.parametrize(
    "path",
    [
        "{root}/..",
        "{root}/../secret",
        "{root}/run/../../secret",
        "{root}/not/../../secret",
        "{root}-of-another",
        "/",
        "/etc",
        "//etc",
        "/proc/self/root/etc",
        "/proc/self/cwd",
        "{root}\0/x",
    ],
)
def test_what_lies_elsewhere_is_refused(root: Path, path: str) -> None:
    with pytest.raises(ForbiddenPathError) as caught:
        confine(path.format(root=root), [root], what="source_dir")
    assert "source_dir" in str(caught.value)


@pytest.mark.parametrize("path", ["", "run", "./run", "~/run", "~"])
def test_what_is_not_absolute_is_refused(root: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(ForbiddenPathError, match="not an absolute path"):
        confine(path, [root], what="source_dir")


def test_a_place_is_allowed_itself_and_nothing_below_it(root: Path) -> None:
    assert confine(f"{root}/run/deep/..", [], places=[root / "run"], what="local_checkpoint_dir") == root / "run"
    for path in (root / "run" / "deep", root):
        with pytest.raises(ForbiddenPathError) as caught:
            confine(str(path), [], places=[root / "run"], what="local_checkpoint_dir")
        assert caught.value.expected == str(root / "run")


class TestLinks:
    def test_out_of_the_root_is_refused_without_telling_where_it_leads(self, root: Path) -> None:
        (root / "link").symlink_to(root.parent / "secret")
        for path in (root / "link", root / "link" / "below", root / "run" / ".." / "link"):
            with pytest.raises(ForbiddenPathError) as caught:
                confine(str(path), [root], what="local_checkpoint_dir")
            assert "secret" not in str(caught.value)

    def test_to_a_place_that_is_not_there_yet(self, root: Path) -> None:
        (root / "link").symlink_to(root.parent / "later")
        with pytest.raises(ForbiddenPathError):
            confine(str(root / "link"), [root], what="local_checkpoint_dir")

    def test_by_way_of_several_links(self, root: Path) -> None:
        (root / "a").symlink_to("b")
        (root / "b").symlink_to("run/c")
        (root / "run" / "c").symlink_to("../../secret")
        with pytest.raises(ForbiddenPathError):
            confine(str(root / "a"), [root], what="source_dir")

    def test_within_the_root_is_followed(self, root: Path) -> None:
        (root / "link").symlink_to("run")
        assert confine(str(root / "link"), [root], what="source_dir") == root / "run"

    def test_the_root_itself_may_be_a_link(self, root: Path) -> None:
        link = root.parent / "mounted"
        link.symlink_to(root)
        assert confine(str(link / "run"), [link], what="source_dir") == root / "run"
        assert confine(str(root / "run"), [link], what="source_dir") == root / "run"

    def test_that_leads_in_a_circle_never_leads_out(self, root: Path) -> None:
        (root / "link").symlink_to("link")
        (root / "out").symlink_to("link/../../secret")
        assert confine(str(root / "link"), [root], what="source_dir").is_relative_to(root)


def test_no_root_allows_nothing_and_the_top_everything(root: Path) -> None:
    with pytest.raises(ForbiddenPathError, match="no directory at all"):
        confine(str(root), [], what="source_dir")
    assert confine("/etc", [Path("/")], what="source_dir") == Path("/etc")


def test_any_of_several_roots_will_do(root: Path) -> None:
    assert confine(str(root / "run"), [root.parent / "secret", root], what="source_dir") == root / "run"
