"""The command line: what it prints, what it exits with, and that an error is one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpusync.cli import main
from support.checkpoints import State, Tensor, changed, read_state, small_state, write_checkpoint
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
def places(site) -> list[object]:
    return ["--local-checkpoint-dir", site.local, "--base-dir", site.base, "--source-dir", site.source]


@pytest.fixture
def states(site) -> list[State]:
    states = [site.state]
    for version in range(1, 4):
        states.append(changed(states[-1], version, names=["layer.0.weight", "step"]))
        publish_delta(site.source, version, states[-2], states[-1])
    return states


def changes_in(source: Path) -> dict[str, str]:
    """The tensors that version 1 changes, and their files."""
    index = json.loads((version_dir(source, 1) / "model.safetensors.index.json").read_text())
    return dict(index["weight_map"])


def test_pull_to_the_newest_version(run, site, places, states) -> None:
    code, out, err = run("pull", *places)
    assert (code, err) == (0, "")
    assert out.startswith("version 3: 2 tensors changed")
    assert f"; first pull: copied {len(site.state)} tensors from base version 0" in out
    assert "empty" not in out
    assert site.local_state() == states[3]
    assert run("pull", *places)[1] == "version 3: already there\n"


def test_pull_tells_json(run, site, places, states) -> None:
    code, out, _ = run("pull", *places, "--target-version", 2, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["target_version"], report["chain"], report["decoder"]) == (2, [1, 2], "host")


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_publish_two_directories_and_pull_them(run, site, places, encoding: str, checksum: str) -> None:
    state, base = site.state, site.base
    for version in (1, 2):
        state = changed(state, version)
        new = write_checkpoint(site.base.with_name(f"step{version}"), state)
        code, out, err = run(
            "publish", "--source-dir", site.source, "--base", base, "--new", new, "--encoding", encoding,
            "--checksum", checksum, "--json",
        )  # fmt: skip
        assert (code, err) == (0, "")
        report = json.loads(out)
        assert (report["version"], report["base_version"], report["encoding"]) == (version, version - 1, encoding)
        base = new
    assert run("pull", *places)[0] == 0
    assert site.local_state() == state


def test_publish_in_full(run, site, places) -> None:
    state = changed(site.state, 1)
    new = write_checkpoint(site.base.with_name("new"), state, files={"tokenizer.json": "{}"})
    code, out, _ = run("publish", "--source-dir", site.source, "--new", new, "--full")
    assert code == 0
    assert out.startswith("version 1 in full")
    assert run("pull", *places)[0] == 0
    assert site.local_state() == state
    assert (site.local / "tokenizer.json").read_text() == "{}"


def test_inspect_a_stream(run, site, states) -> None:
    publish_full(site.source, 4, states[3])
    code, out, _ = run("inspect", site.source, "--base-dir", site.base, "--json")
    rows = json.loads(out)["versions"]
    assert code == 0
    assert [(row["version"], row["kind"], row["base"], row["encoding"]) for row in rows] == [
        (1, "delta", 0, "xor"),
        (2, "delta", 1, "xor"),
        (3, "delta", 2, "xor"),
        (4, "full", None, None),
    ]
    assert [row["tensors"] for row in rows] == [2, 2, 2, len(site.state)]
    assert all(0 < row["percent_of_checkpoint"] < 1 for row in rows[:3])


def test_inspect_says_once_what_all_versions_share(run, site, states) -> None:
    code, out, _ = run("inspect", site.source)
    title, headings, rule, *rows = out.splitlines()
    assert (code, title) == (0, f"{site.source}: 3 versions, checksum xxh3-128")
    assert headings.split() == ["version", "kind", "base", "encoding", "tensors", "wire", "of", "full"]
    assert set(rule.split()[0]) == {"-"}
    assert [row.split()[:5] for row in rows] == [[str(n), "delta", str(n - 1), "xor", "2"] for n in (1, 2, 3)]
    publish_delta(site.source, 4, states[3], changed(states[3], 4), checksum="blake3", metadata={"stream_id": "a" * 36})
    title, headings, *rows = run("inspect", site.source)[1].splitlines()
    assert title == f"{site.source}: 4 versions"
    assert headings.split()[-3:] == ["of", "full", "stream"]
    assert "checksum" in headings.split()
    assert rows[-1].split()[-1] == "aaaaaaaa"


def test_inspect_fits_80_columns_and_cuts_names_in_the_middle(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"model.language_model.layers.{n}.self_attention.query_projection.weight" for n in (1, 2)]
    state = {**site.state, **dict.fromkeys(names, site.state["layer.0.weight"])}
    publish_delta(site.source, 1, state, changed(state, 1), checksum="blake3")
    out = run("inspect", version_dir(site.source, 1))[1]
    assert "delta on version 0, checksum blake3" in out.splitlines()[0]
    rows = out.splitlines()[1:]
    assert all(len(row) <= 80 for row in rows)
    assert len(rows) == 2 + len(changes_in(site.source))
    first, second = (row for row in rows if row.startswith("model.language"))
    assert first.split()[0] != second.split()[0]
    assert "..." in first.split()[0]
    assert first.split()[0].endswith("projection.weight")
    assert " kB " in first


def test_inspect_prints_no_control_characters_of_names(run, site) -> None:
    name = "evil\x1b[31m"
    state = {**site.state, name: small_state()["step"]}
    publish_delta(site.source, 1, state, changed(state, 1, names=[name]))
    out = run("inspect", version_dir(site.source, 1))[1]
    assert "\x1b" not in out
    assert "evil\\x1b" in out


def test_inspect_goes_on_after_a_version_that_cannot_be_read(run, site, states) -> None:
    (version_dir(site.source, 2) / "model.safetensors.index.json").write_text("{")
    code, out, err = run("inspect", site.source, "--json")
    assert code == 1
    assert err.count("\n") == 1
    assert json.loads(out)["error"]["path"] == str(site.source)
    assert ["error" in row for row in json.loads(out)["versions"]] == [False, True, False]
    error = json.loads(out)["versions"][1]["error"]
    code, out, _ = run("inspect", site.source)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["1", "3"]
    assert out.splitlines()[5:] == [f"version 2 cannot be read: {error}"]


@pytest.mark.parametrize(
    ("encoding", "form"), [("xor", "xor"), ("overwrite", "overwrite"), ("gpusync", "GP01"), (None, "BF16[64, 48]")]
)
def test_inspect_a_version_by_tensor(run, site, encoding: str | None, form: str) -> None:
    new = write_checkpoint(site.base.with_name("new"), changed(site.state, 1))
    how = ["--full"] if encoding is None else ["--base", site.base, "--encoding", encoding]
    run("publish", "--source-dir", site.source, "--new", new, *how)
    code, out, _ = run("inspect", version_dir(site.source, 1), "--json")
    rows = {row["tensor"]: row for row in json.loads(out)["tensors"]}
    assert code == 0
    assert rows["layer.0.weight"]["form"].startswith(form)
    if encoding != "overwrite":
        assert rows["layer.0.weight"]["tensor_bytes"] == 64 * 48 * 2


def test_plan(run, site, places, states) -> None:
    assert run("plan", *places)[1] == "target 3: start from base version 0 (first pull), apply 1, 2, 3\n"
    run("pull", *places, "--target-version", 1)
    code, out, _ = run("plan", *places)
    assert code == 0
    assert out == "target 3: start from local version 1 (continues the local checkpoint), apply 2, 3\n"


def test_a_pull_says_why_it_replaces_what_is_there_and_does_not_say_store(run, site, places, states) -> None:
    run("pull", *places, "--target-version", 2)
    out = run("pull", *places, "--target-version", 1, "--allow-rewind")[1]
    assert "; seeded from base version 0 (rewinding from version 2)" in out
    assert json.loads(run("pull", *places, "--json")[1])["reason"] == "continues the local checkpoint"


def test_one_is_not_plural(run, site, places) -> None:
    publish_delta(site.source, 1, site.state, changed(site.state, 1, names=["step"]))
    assert run("pull", *places)[1].startswith("version 1: 1 tensor changed, ")


def test_verify(run, site, places, states) -> None:
    run("pull", *places)
    code, out, _ = run("verify", site.local)
    assert (code, out.split(",")[0]) == (0, f"version 3: {len(site.state)} tensors")
    path = site.local / "model-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, _, err = run("verify", site.local)
    assert (code, err.count("\n")) == (1, 1)
    assert "is not version 3" in err
    told = json.loads(run("verify", site.local, "--json")[1])
    assert (told["version"], told["error"]["type"]) == (3, "DigestMismatchError")
    assert told["damage"] in told["error"]["message"]


def test_an_error_is_one_line_whatever_the_names_hold(run, site, places) -> None:
    name = "evil\n\x1b[31mversion 9: all is well\u202e"
    state = {**site.state, name: small_state()["step"]}
    publish_delta(site.source, 1, state, changed(state, 1, names=[name]))
    code, out, err = run("pull", *places)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "\x1b" not in err
    assert "evil\\n" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull"],
        ["pull", "--target-version", "-3"],
        ["pull", "--target-version", "newest"],
        ["frobnicate"],
        ["publish", "--source-dir", "x", "--new", "y"],
        ["publish", "--source-dir", "x", "--base", "y", "--new", "z", "--encoding", "gzip"],
    ],
)
def test_wrong_usage_exits_with_2(run, arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


def test_a_source_that_is_not_there(run, tmp_path: Path) -> None:
    code, _, err = run(
        "pull", "--local-checkpoint-dir", tmp_path / "l", "--base-dir", tmp_path / "b", "--source-dir", tmp_path / "s"
    )
    assert (code, err.count("\n")) == (1, 1)
    assert str(tmp_path / "s") in err


def test_an_error_in_json_has_its_facts(run, site, places, states) -> None:
    run("pull", *places, "--target-version", 2)
    code, out, err = run("pull", *places, "--target-version", 1, "--json")
    assert (code, err.count("\n"), out.count("\n")) == (1, 1, 1)
    error = json.loads(out)["error"]
    assert set(error) == {"type", "message", "path", "version", "tensor", "expected", "found"}
    assert (error["type"], error["version"], error["found"]) == ("ChainError", 1, 1)
    assert error["message"] in err
    code, out, _ = run("pull", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "MissingParameter")


HOOK = """
import os, subprocess, sys
print("imported")

def hook(*arguments):
    print("printed")
    os.write(1, b"written")
    subprocess.run([sys.executable, "-c", "print('by another process')"], check=True)
"""


@pytest.mark.parametrize("name", ["hooks_of_mine.hook", "hooks_of_mine:hook"])
def test_a_hook_beside_the_user_is_found_and_does_not_print_into_json(site, states, tmp_path, name: str) -> None:
    (tmp_path / "hooks_of_mine.py").write_text(HOOK)
    code = "import sys; sys.path.remove(''); from gpusync.cli import main; main()"
    options = ["--local-checkpoint-dir", site.local, "--base-dir", site.base, "--source-dir", site.source]
    command = [sys.executable, "-c", code, "pull", *map(str, options), "--pre-read-hook", name, "--json"]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "kernels")))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target_version"] == 3
    for text in ("imported", "printed", "written", "by another process"):
        assert text in done.stderr


def test_both_forms_of_a_hook_are_in_the_help(run) -> None:
    assert "pkg.mod.fn or pkg.mod:fn" in " ".join(run("pull", "--help")[1].split())


def test_the_import_path_is_what_it_was_after_a_command(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    run("doctor")
    assert sys.path == before


@pytest.mark.parametrize("module", ["click", "numpy", "gpusync.disk"])
def test_an_interrupt_while_it_imports_is_one_line(module: str) -> None:
    code = f"""
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from gpusync.cli import main
main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gpusync: interrupted\n")


def test_inspect_a_directory_without_versions(run, site) -> None:
    assert run("inspect", site.source) == (0, f"{site.source}: no versions here\n", "")
    assert json.loads(run("inspect", site.source, "--json")[1]) == {"versions": []}


@pytest.mark.parametrize("command", ["pull", "plan", "verify", "demo", "inspect"])
def test_a_directory_that_does_not_exist_is_called_so(run, site, states, tmp_path: Path, command: str) -> None:
    nope = tmp_path / "nope"
    places = ["--local-checkpoint-dir", site.local, "--base-dir", nope, "--source-dir", site.source]
    arguments = {
        "verify": [nope],
        "demo": ["--model", nope, "--work-dir", tmp_path / "work"],
        "inspect": [site.source, "--base-dir", nope],
    }
    code, out, err = run(command, *arguments.get(command, places))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"directory does not exist: in {nope}" in err
    assert "index.json" not in err


def test_doctor_looks_at_directories(run, site, places, states) -> None:
    run("pull", *places)
    code, out, _ = run("doctor", "--local-checkpoint-dir", site.local, "--source-dir", site.source, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["local_checkpoint"]["version"] == 3
    assert (told["stream"]["directory"], told["stream"]["writable"]) == ("exists", True)
    assert told["packages"]["numpy"][0].isdigit()
    assert told["machine"]["cores"] == os.cpu_count()
    assert all(
        re.fullmatch(r"[a-z_]+", key) for part in ("machine", "local_checkpoint", "stream") for key in told[part]
    )


def test_doctor_says_what_is_no_directory_and_what_cannot_be_written(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = run("doctor", "--local-checkpoint-dir", tmp_path / "a" / "b", "--source-dir", tmp_path / "file")
    local, stream = out.split("local checkpoint\n")[1].split("stream\n")
    assert code == 0
    assert re.search(r"directory +does not exist\n +writable +yes\n", local)
    assert re.search(r"directory +not a directory\n +writable +no\n", stream)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    told = json.loads(run("doctor", "--source-dir", tmp_path, "--json")[1])
    assert (told["stream"]["directory"], told["stream"]["writable"]) == ("exists", False)


@pytest.mark.parametrize(
    ("missing", "has_device", "told"),
    [
        ({"torch", "triton"}, True, "not usable: torch and triton not installed"),
        (set(), False, "not usable: no NVIDIA device"),
        ({"nvidia"}, True, "Triton applies, the host decodes"),
        (set(), True, "Triton applies, nvCOMP decodes"),
    ],
)
def test_doctor_tells_whether_a_device_is_used(run, tmp_path, monkeypatch, missing, has_device, told) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name in missing else object())
    monkeypatch.setattr("gpusync.cli.doctor.NVIDIA_DEVICES", tmp_path if has_device else tmp_path / "none")
    (tmp_path / "0000:01:00.0").mkdir()
    assert told in json.loads(run("doctor", "--json")[1])["backends"]["device"]


def test_serving_without_what_it_needs_names_the_extra(run, tmp_path, monkeypatch) -> None:
    places = ["--source-dir", tmp_path / "a", "--local-checkpoint-dir", tmp_path / "b"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "uvicorn" else object())
    code, _, err = run("serve", "--model", tmp_path, *places)
    assert code == 2
    assert "needs uvicorn: install gpusync with the extra `server`" in " ".join(err.split())


def test_live_weights_without_torch_are_refused_by_name() -> None:
    code = "import sys; sys.modules['torch'] = None; import gpusync; gpusync.WeightSync"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ModuleNotFoundError: gpusync.WeightSync needs torch, which is not installed\n")


def test_summaries_are_not_cut_and_every_option_has_its_help(run) -> None:
    from gpusync.cli.main import cli

    out = run("--help")[1]
    assert all(line.endswith(".") for line in out.partition("Commands:\n")[2].splitlines())
    assert "..." not in out.partition("Commands:\n")[2]
    for name in set(cli.commands) - {"publish"}:
        for option in cli.commands[name].params:
            assert option.param_type_name == "argument" or option.help, (name, option.name)


def test_as_a_module_and_into_a_closed_pipe(site, states) -> None:
    command = [sys.executable, "-m", "gpusync", "inspect", str(site.source)]
    done = subprocess.run(f"{' '.join(command)} | true", shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_a_progress_bar_on_a_terminal_after_a_second(monkeypatch: pytest.MonkeyPatch, site, states) -> None:
    from gpusync.cli import output

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(output, "SHOW_AFTER_S", 0.0)
    with output.progress_bar("pulling") as progress:
        site.pull(3, progress=progress)
    monkeypatch.delenv("FORCE_COLOR")
    with output.progress_bar("pulling") as progress:
        assert progress(1, 2) is None


def test_pulled_files_open_with_plain_safetensors(run, site, places, states) -> None:
    from safetensors import safe_open

    run("pull", *places)
    names = set()
    for path in site.local.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            names |= set(file.keys())
    assert names == set(states[3])
    assert isinstance(read_state(site.local)["step"], Tensor)
