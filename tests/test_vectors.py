"""The golden vectors, through the disk path and the command line: valid streams exactly, malformed ones not at all."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from gpusync import pull
from gpusync.cli import main
from support.checkpoints import read_state, snapshot

VECTORS = Path(__file__).parent / "golden" / "vectors"
STREAMS = sorted(path.name for path in (VECTORS / "streams").iterdir())
CASES = sorted(path.name for path in (VECTORS / "bad").iterdir())


def expected(stream: str) -> dict[int, dict]:
    told = json.loads((VECTORS / "streams" / stream / "expected.json").read_text())
    return {int(version): what for version, what in told["versions"].items()}


def found(local: Path) -> dict[str, list[str]]:
    return {
        name: [
            f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]",
            xxhash.xxh3_128(tensor.data.tobytes()).hexdigest(),
            hashlib.sha256(tensor.data.tobytes()).hexdigest(),
        ]
        for name, tensor in read_state(local).items()
    }


def check(local: Path, what: dict) -> None:
    assert found(local) == what["tensors"]
    for name, sha256 in what["files"].items():
        assert hashlib.sha256((local / name).read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize("stream", STREAMS)
def test_a_valid_stream(stream: str, tmp_path: Path) -> None:
    """Each version at once into an empty directory, then version by version from 0, then the last one again."""
    versions = expected(stream)
    places = {"base_dir": VECTORS / "base", "source_dir": VECTORS / "streams" / stream}
    for version, what in versions.items():
        pull(local_checkpoint_dir=tmp_path / str(version), target_version=version, **places)
        check(tmp_path / str(version), what)
    pull(local_checkpoint_dir=tmp_path / "steps", target_version=0, **places)
    for version, what in versions.items():
        pull(local_checkpoint_dir=tmp_path / "steps", target_version=version, **places)
        check(tmp_path / "steps", what)
    last = max(versions)
    assert pull(local_checkpoint_dir=tmp_path / "steps", target_version=last, **places).shared
    check(tmp_path / "steps", versions[last])


def arguments(case: str, local: Path, version: int) -> list[str]:
    return [
        "pull", "--local-checkpoint-dir", str(local), "--base-dir", str(VECTORS / "base"),
        "--source-dir", str(VECTORS / "bad" / case / "source"), "--target-version", str(version),
    ]  # fmt: skip


def run(case: str, local: Path, version: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments(case, local, version))
    return int(caught.value.code or 0), capsys.readouterr().err


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_stream(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((VECTORS / "bad" / case / "case.json").read_text())
    local = tmp_path / "local"
    assert run(case, local, told["start"], capsys)[0] == 0
    before, published = snapshot(local), tree(VECTORS / "bad" / case)
    began = time.monotonic()
    code, stderr = run(case, local, told["target"], capsys)
    assert time.monotonic() - began < 10
    assert code == 1
    assert stderr.count("\n") == 1
    assert any(name in stderr for name in told["names"])
    assert snapshot(local) == before
    assert tree(VECTORS / "bad" / case) == published
    assert run(case, local, told["start"], capsys)[0] == 0


@pytest.mark.parametrize(
    "case", [case for case in CASES if json.loads((VECTORS / "bad" / case / "case.json").read_text()).get("limit")]
)
def test_a_bomb_under_one_gibibyte_of_address_space(case: str, tmp_path: Path) -> None:
    told = json.loads((VECTORS / "bad" / case / "case.json").read_text())
    local = tmp_path / "local"
    pull(
        local_checkpoint_dir=local,
        base_dir=VECTORS / "base",
        source_dir=VECTORS / "bad" / case / "source",
        target_version=told["start"],
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpusync", *arguments(case, local, told["target"])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert any(name in done.stderr for name in told["names"])
