"""`gpusync serve` refuses what it cannot do before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpusync.cli import main
from support.checkpoints import small_state, write_checkpoint


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["serve", *(str(argument) for argument in arguments)])
        return int(caught.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--source-root"),
        (["--source-root", "/s"], "--source-root and --local-root"),
        (["--source-dir", "/s"], "belong together"),
        (["--source-root", "/s", "--local-root", "/l", "--tp", "0"], "--tp"),
        (["--source-root", "/s", "--local-root", "/l", "--port", "65536"], "--port"),
    ],
)
def test_wrong_usage_exits_with_2(run, tmp_path: Path, options: list[str], told: str) -> None:
    code, error = run("--model", tmp_path, *options)
    assert code == 2
    assert told in error


def test_a_directory_without_a_checkpoint_is_an_error_of_one_line(run, tmp_path: Path) -> None:
    code, error = run("--model", tmp_path, "--source-root", tmp_path, "--local-root", tmp_path)
    assert code == 1
    assert str(tmp_path) in error
    assert error.count("\n") == 1


def test_a_port_that_is_taken_is_an_error_of_one_line(run, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "base", small_state())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, error = run("--model", model, "--source-root", tmp_path, "--local-root", tmp_path, "--port", port)
    assert code == 1
    assert f"cannot listen: in 127.0.0.1:{port}" in error
    assert error.count("\n") == 1


def test_an_open_address_without_a_token_is_said(run, tmp_path: Path) -> None:
    _, error = run("--model", tmp_path, "--source-root", "/s", "--local-root", "/l", "--host", "0.0.0.0")
    assert "anybody who reaches 0.0.0.0 may update these weights" in error
