"""`gpusync prune` on the command line."""

from __future__ import annotations

import json

import pytest

from gpusync.cli import main
from gpusync.stream import list_versions
from support.checkpoints import changed
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
