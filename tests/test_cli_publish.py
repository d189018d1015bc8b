"""`gpusync publish` with directories that do not fit the stream: told in one line, before anything is written."""

from __future__ import annotations

import json

import pytest

from gpusync.cli import main
from gpusync.stream import list_versions
from support.checkpoints import State, changed, write_checkpoint
from support.receiver import receive


@pytest.fixture
def publish(site, capsys: pytest.CaptureFixture[str]):
    """Publish in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["publish", "--source-dir", str(site.source), *map(str, arguments)])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def states(site, publish, tmp_path) -> list[State]:
    """Two deltas, published from directories named after their versions."""
    states = [site.state]
    for version in (1, 2):
        states.append(changed(states[-1], version, names=["layer.0.weight", "step"]))
        base = site.base if version == 1 else tmp_path / "1"
        assert publish("--base", base, "--new", write_checkpoint(tmp_path / str(version), states[-1]))[0] == 0
    return states


def test_a_base_that_is_not_the_newest_version(site, publish, states, tmp_path) -> None:
    new = write_checkpoint(tmp_path / "new", changed(states[2], 3))
    for base, version in ((site.base, []), (tmp_path / "1", []), (tmp_path / "2", ["--base-version", 1])):
        code, out, err = publish("--base", base, "--new", new, *version)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"the base is not version {1 if version else 2}: tensor `layer.0.weight`, in {base}" in err
        assert "expected" in err
        assert "found" in err
    assert list_versions(site.source) == [1, 2]
    assert publish("--base", tmp_path / "2", "--new", new)[0] == 0
    assert receive(site.state, site.source, 3) == changed(states[2], 3)


def test_a_full_version_of_a_stream_of_deltas_needs_no_base(site, publish, states, tmp_path) -> None:
    after = changed(states[2], 3)
    code, out, err = publish("--full", "--new", write_checkpoint(tmp_path / "new", after), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["version"], report["kind"]) == (3, "full")
    assert receive(site.state, site.source, 3) == after
    streams = {
        json.loads((site.source / f"weight_v00000{n}" / "model.safetensors.index.json").read_text())["metadata"][
            "stream_id"
        ]
        for n in (1, 2, 3)
    }
    assert len(streams) == 1


def test_a_full_version_that_is_not_complete_names_the_way_out(site, publish, states, tmp_path) -> None:
    new = write_checkpoint(tmp_path / "new", {name: t for name, t in states[2].items() if name != "step"})
    code, _, err = publish("--full", "--new", new)
    assert (code, err.count("\n")) == (1, 1)
    assert "`step`" in err
    assert "--base" in err
    assert list_versions(site.source) == [1, 2]
    assert publish("--full", "--new", new, "--base", tmp_path / "2")[0] == 0
    assert receive(site.state, site.source, 3) == states[2]


def test_tensors_that_are_left_out_are_told(site, publish, tmp_path) -> None:
    new = write_checkpoint(tmp_path / "new", {**changed(site.state, 1), "extra.weight": site.state["step"]})
    code, out, _ = publish("--base", site.base, "--new", new)
    assert code == 0
    assert "warning: NOT PUBLISHED: 1 of 8 tensors offered" in out
    assert "`extra.weight`" in out


def test_another_model_is_an_error(site, publish, tmp_path) -> None:
    new = write_checkpoint(tmp_path / "new", {f"module.{name}": t for name, t in site.state.items()})
    code, out, err = publish("--base", site.base, "--new", new)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "`module.embed.weight`" in err
    assert list_versions(site.source) == []
