"""`gpusync prune`, and `gpusync publish --base-version`, on the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from gpusync.cli import main
from gpusync.stream import list_versions, read_index
from support.checkpoints import changed, write_checkpoint
from support.slime import publish_delta, publish_full, version_dir


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def states(site):
    states = [site.state]
    for version in range(1, 7):
        states.append(changed(states[-1], version, names=["layer.0.weight", "step"]))
        if version == 4:
            publish_full(site.source, version, states[-1])
        else:
            publish_delta(site.source, version, states[-2], states[-1])
    return states


def test_a_dry_run_and_the_run(run, site, states) -> None:
    (version_dir(site.source, 2) / "notes.md").write_text("")
    code, out, err = run("prune", site.source, "--keep-last", 1, "--dry-run")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("would remove versions 1-3, ")
    assert out.splitlines()[0].endswith("; kept versions 4-6")
    assert out.splitlines()[1:3] == ["kept version 6: newest", "kept versions 4-5: kept versions build on them"]
    assert len(list_versions(site.source)) == 6
    told = json.loads(run("prune", site.source, "--keep-last", 1, "--keep-full-every", 2, "--json")[1])
    assert told["removed"] == [3, 2, 1]
    assert told["kept"] == {"4": "anchor", "5": "needed", "6": "newest"}
    assert told["left"] == {str(version_dir(site.source, 2)): ["notes.md"]}
    assert list_versions(site.source) == [2, 4, 5, 6]
    code, out, _ = run("prune", site.source, "--keep-last", 1)
    assert "an earlier run had begun with version 2" in out
    assert out.splitlines()[-1] == f"not ours, left in {version_dir(site.source, 2)}: notes.md"


def test_wrong_usage_and_a_stream_that_is_not_there(run, site) -> None:
    assert run("prune", site.source)[0] == 2
    assert run("prune", site.source, "--keep-last", 0)[0] == 2
    code, out, err = run("prune", site.source / "nowhere", "--keep-last", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_publish_on_an_older_version(run, site, states) -> None:
    """By its checkpoint: on a delta, on a full version, on the base."""
    state = states[-1]
    for version, base in ((7, 5), (8, 4), (9, 0), (10, 9)):
        base_dir = write_checkpoint(site.base.with_name(f"base{version}"), state if base == 9 else states[base])
        state = changed(state, version)
        new = write_checkpoint(site.base.with_name(f"new{version}"), state)
        place = ["--source-dir", site.source, "--base", base_dir, "--new", new]
        code, out, err = run("publish", *place, "--base-version", base)
        assert (code, err) == (0, "")
        assert out.startswith(f"version {version} on version {base}: ")
        site.pull(version)
        assert site.local_state() == state
        shutil.rmtree(site.local)
        site.pull(version)
        assert site.local_state() == state
    ids = {read_index(site.source, version).stream_id for version in range(8, 11)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--base-version", 7], "VersionMissingError"),
        (["--base-version", 2, "--version", 6], "versions only go up"),
        (["--base-version", 2, "--version", 3], "versions only go up"),
    ],
)
def test_an_older_version_that_cannot_carry_it(run, site, states, options, text) -> None:
    place = ["--source-dir", site.source, "--base", site.base, "--new", site.base]
    code, out, err = run("publish", *place, *options)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert text in err
    assert run("publish", *place, "--full", "--base-version", 2)[0] == 2


def test_a_directory_that_an_attempt_left_is_no_version_to_build_on(run, site, states) -> None:
    version_dir(site.source, 9).mkdir()
    base_dir = write_checkpoint(site.base.with_name("newest"), states[-1])
    code, out, _ = run("publish", "--source-dir", site.source, "--base", base_dir, "--new", base_dir)
    assert (code, out.split(":")[0]) == (0, "version 7 on version 6")
