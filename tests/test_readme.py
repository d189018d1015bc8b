"""What README.md says is there: commands, options, names, files, tests."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import click
import numpy as np
import pytest

import gpusync
from gpusync import errors
from gpusync.cli import main
from gpusync.cli.main import cli
from gpusync.codec import MemoryPayload, apply_whole
from gpusync.endpoint.client import Client
from gpusync.engines.module import weight_sync
from gpusync.trainers import named_tensors
from support.gf01 import decode_gf01
from support.gp01 import decode_gp01
from support.gs01 import decode_gs01

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`]+)`", PROSE)
LINKS = [target for target in re.findall(r"\]\(([^)\s]+)\)", PROSE) if not re.match(r"[a-z]+:|#", target)]
# A link to tests, and the classes and functions named behind it.
PROOFS = [
    (path, re.findall(r"`(\w+)`", names)) for path, names in re.findall(r"\]\((tests/[^)]+)\)((?:,? *`\w+`)*)", PROSE)
]
PYTHON = [text for language, text in BLOCKS if language == "python"]


def shell_lines() -> list[str]:
    return [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]


def command_lines() -> list[str]:
    """Every `gpusync ...` of a shell block or in code font."""
    parts = [part.strip() for line in shell_lines() for part in line.split("&&")]
    return [text for text in [*parts, *SPANS] if re.match(r"gpusync [a-z]", text)]


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def split_command(title: str) -> list[str]:
    """The one shell line that comes first behind a paragraph that starts with `title`."""
    found = re.search(rf"^{title}.*?^```sh\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    assert "\n" not in found[1]
    return [part.strip() for part in found[1].split("&&")]


def options_of(command: click.Command) -> set[str]:
    return {name for option in command.params for name in option.opts} | {"--help"}


def test_the_test_command_is_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    lines = [line.replace(" --quiet", "").strip() for line in ci.splitlines()]
    install, test = split_command("Test it")
    assert install in lines
    assert any(line.split(" --junit-xml")[0] == test for line in lines)
    (pinned,) = {span for span in SPANS if re.fullmatch(r"python -m pip install torch==[\w.]+", span)}
    assert any(line.startswith(pinned) for line in lines)


def test_the_demo_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    install, demo = split_command("Run it")
    assert install == "python -m pip install ."
    program, *arguments = shlex.split(demo)
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]\n")[2].partition("\n\n")[0]
    (entry,) = re.findall(rf'^{program} = "([\w.]+:\w+)"$', scripts, re.MULTILINE)
    module, function = entry.split(":")
    assert getattr(importlib.import_module(module), function) is main
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    assert cli.commands["demo"].help in " ".join(capsys.readouterr().out.split())
    # What the command calls is what this test runs, to the end.
    assert inspect.getsource(importlib.import_module("gpusync.cli.run_demo")).count("run_demo(") == 1
    assert "run_demo(" in (ROOT / "tests" / "demo" / "test_run.py").read_text()


@pytest.mark.parametrize("target", LINKS)
def test_a_relative_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target.partition("#")[0]).exists()


@pytest.mark.parametrize(("path", "names"), PROOFS, ids=[path for path, _ in PROOFS])
def test_what_shows_a_guarantee_is_a_test(path: str, names: list[str]) -> None:
    place = ROOT / path
    files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    defined = {
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    assert any(name.startswith("test_") for name in defined)
    assert set(names) <= defined


@pytest.mark.parametrize("text", PYTHON, ids=range(len(PYTHON)))
def test_python_compiles_and_passes_arguments_that_exist(text: str) -> None:
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    known = {
        "gpusync.pull": gpusync.pull,
        "Publisher": gpusync.Publisher,
        "publisher.publish": gpusync.Publisher.publish,
        "publisher.publish_full": gpusync.Publisher.publish_full,
        "gpusync.Mirror": gpusync.Mirror,
        "mirror.receive": gpusync.Mirror.receive,
        "mirror.accept": gpusync.Mirror.accept,
        "mirror.flush": gpusync.Mirror.flush,
        "gpusync.WeightSync": gpusync.WeightSync,
        "sync.prepare": gpusync.WeightSync.prepare,
        "sync.commit": gpusync.WeightSync.commit,
        "Client": Client,
        "client.prepare": Client.prepare,
        "client.commit": Client.commit,
        "client.pull": Client.pull,
        "gpusync.Fleet": gpusync.Fleet,
        "fleet.pull": gpusync.Fleet.pull,
        "named_tensors": named_tensors,
        "weight_sync": weight_sync,
    }
    checked = 0
    for call in calls:
        function = known.get(ast.unparse(call.func))
        if function is not None:
            assert {keyword.arg for keyword in call.keywords} <= set(inspect.signature(function).parameters)
            checked += 1
    assert checked
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "report":
            report = gpusync.PublishReport if "Publisher" in text else gpusync.PullReport
            assert node.attr in {*report.__dataclass_fields__, *dir(report)}


def test_every_name_of_the_package_exists() -> None:
    names = {name for text in [*SPANS, *PYTHON] for name in re.findall(r"\bgpusync\.([A-Za-z]\w*)", text)}
    assert {"pull", "GpusyncError"} <= names
    for name in names:
        assert hasattr(gpusync, name) or importlib.util.find_spec(f"gpusync.{name}") is not None, name
    for text in SPANS:
        for arguments in re.findall(r"\bPublisher\(([^)]*)\)", text):
            keywords = re.findall(r"(\w+)=", arguments)
            assert set(keywords) <= set(inspect.signature(gpusync.Publisher).parameters)


def test_every_subcommand_and_option_exists() -> None:
    lines = command_lines()
    assert {"demo", "publish", "pull"} <= {line.split()[1] for line in lines}
    for line in lines:
        _, name, *rest = shlex.split(line)
        assert name in cli.commands, line
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= options_of(cli.commands[name]), line
    known = set().union(*map(options_of, cli.commands.values()))
    assert {text for text in SPANS if re.fullmatch(r"--[\w-]+", text)} <= known


def test_json_is_everywhere() -> None:
    assert "`--json` everywhere" in README
    for name, command in cli.commands.items():
        assert "--json" in options_of(command), name


def test_the_options_of_pull_are_its_arguments_on_both_sides() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section("Pull"), re.MULTILINE)
    assert rows
    for name in rows:
        assert name in inspect.signature(gpusync.pull).parameters
        assert f"--{name.replace('_', '-')}" in options_of(cli.commands["pull"])


def test_every_error_exists() -> None:
    text = section("Errors")
    names = set(re.findall(r"\b[A-Z]\w*Error\b", text))
    assert len(names) > 5
    for name in names:
        assert issubclass(getattr(errors, name), errors.GpusyncError)
    for field in re.findall(r"`([a-z]+)`", text):
        assert hasattr(errors.GpusyncError(""), field)


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("gs01", [0, 0x3F80, 2, 3, 4, 0x8001, 6, 7], [0, 0x3F81, 2, 3, 4, 0x8003, 6, 7]),
        ("gp01", [0, 0x3F80, 2, 3, 4, 0x8001, 6, 7], [0, 0x3F81, 2, 3, 4, 0x8003, 6, 7]),
        ("gf01", [0x3F80, 0x8001], [0x3F81, 0x8003]),
    ],
)
def test_the_examples_of_payloads_decode(form: str, old: list[int], new: list[int]) -> None:
    (text,) = (text for language, text in BLOCKS if language == form)
    payload = bytes.fromhex("".join(line.split("|")[0] for line in text.splitlines()))
    before, after = (np.array(words, "<u2").view(np.uint8) for words in (old, new))
    target = before.copy()
    apply_whole(MemoryPayload(payload), target, encoding="gpusync", element_bytes=2, float_order=True)
    np.testing.assert_array_equal(target, after)
    independent = {"gs01": decode_gs01, "gp01": decode_gp01, "gf01": decode_gf01}[form]
    np.testing.assert_array_equal(independent(payload, before, "BF16"), after)
