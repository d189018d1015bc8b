"""The golden vectors of our own format: valid streams exactly, by our reader, by another one, and as our publisher
writes them; a stream with a fault not at all."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
import zstandard

from gpusync import GpusyncError, Publisher, errors, pull
from gpusync.cli import main
from gpusync.publish import StoredBytes
from support.checkpoints import State, read_state, snapshot, write_checkpoint
from support.receiver import receive

GOLDEN = Path(__file__).parent / "golden"
VECTORS = GOLDEN / "gpusync"
STREAMS = sorted(path.name for path in (VECTORS / "streams").iterdir())
CASES = sorted(path.name for path in (VECTORS / "bad").iterdir())
# The generator's: other versions compress to other bytes, which decode to the same.
MADE_WITH_ZSTD = (1, 5, 7)


@pytest.fixture(scope="session", name="forms_base")
def _forms_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base of `gf01_forms`: a lone `model.safetensors`, which is stored compressed."""
    directory, stored = tmp_path_factory.mktemp("forms"), VECTORS / "base"
    (directory / "config.json").write_bytes((stored / "config.json").read_bytes())
    data = zstandard.decompress((stored / "model.safetensors.zst").read_bytes())
    (directory / "model.safetensors").write_bytes(data)
    return directory


def base_of(told: dict, directory: Path, forms_base: Path) -> Path:
    base = (directory / told["base"]).resolve()
    return forms_base if base == VECTORS / "base" else base


def read_told(directory: Path) -> dict:
    return json.loads((directory / "expected.json").read_text())


def described(state: State) -> dict[str, list[str]]:
    return {
        name: [
            f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]",
            xxhash.xxh3_128(tensor.data.tobytes()).hexdigest(),
            hashlib.sha256(tensor.data.tobytes()).hexdigest(),
        ]
        for name, tensor in state.items()
    }


def check(local: Path, what: dict) -> None:
    assert described(read_state(local)) == what["tensors"]
    for name, sha256 in what["files"].items():
        assert hashlib.sha256((local / name).read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize("stream", STREAMS)
def test_a_valid_stream(stream: str, forms_base: Path, tmp_path: Path) -> None:
    """The last version at once, every version from an empty directory, and version by version from 0."""
    source = VECTORS / "streams" / stream
    told = read_told(source)
    places = {"base_dir": base_of(told, source, forms_base), "source_dir": source}
    pull(local_checkpoint_dir=tmp_path / "steps", target_version=0, **places)
    for version, what in told["versions"].items():
        pull(local_checkpoint_dir=tmp_path / version, target_version=int(version), **places)
        check(tmp_path / version, what)
        pull(local_checkpoint_dir=tmp_path / "steps", target_version=int(version), **places)
        check(tmp_path / "steps", what)


@pytest.mark.parametrize("stream", STREAMS)
def test_another_reader_agrees(stream: str, forms_base: Path) -> None:
    source = VECTORS / "streams" / stream
    told = read_told(source)
    base = read_state(base_of(told, source, forms_base))
    for version, what in told["versions"].items():
        assert described(receive(base, source, int(version))) == what["tensors"]


@pytest.mark.parametrize("stream", ["gf01_forms", "mixed"])
def test_our_publisher_says_the_same_to_another_reader(stream: str, forms_base: Path, tmp_path: Path) -> None:
    """The same states, published: deltas where only bytes change, a full version where tensors come or go."""
    source = VECTORS / "streams" / stream
    told = read_told(source)
    base_dir = base_of(told, source, forms_base)
    base = state = read_state(base_dir)
    publisher = Publisher(tmp_path / "stream", base_dir=base_dir, encoding="gpusync")
    for version in map(int, told["versions"]):
        before, state = state, receive(base, source, version)
        offers = {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in state.items()}
        if state.keys() == before.keys():
            publisher.publish(offers)
        else:
            # a publisher does not drop tensors: another one, without what it would fill in, does
            gone = write_checkpoint(tmp_path / "gone", state)
            publisher = Publisher(tmp_path / "stream", base_dir=gone, encoding="gpusync", base_version=version - 1)
            publisher.publish_full(offers)
        assert receive(base, tmp_path / "stream", version) == state
        pull(
            local_checkpoint_dir=tmp_path / "local",
            base_dir=base_dir,
            source_dir=tmp_path / "stream",
            target_version=version,
        )
        assert read_state(tmp_path / "local") == state


def arguments(case: str, local: Path, version: int) -> list[str]:
    return [
        "pull", "--local-checkpoint-dir", str(local), "--base-dir", str(GOLDEN / "vectors" / "base"),
        "--source-dir", str(VECTORS / "bad" / case / "source"), "--target-version", str(version),
    ]  # fmt: skip


def run(case: str, local: Path, version: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments(case, local, version))
    return int(caught.value.code or 0), capsys.readouterr().err


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_with_a_fault(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused for its fault and nothing else, whether the local checkpoint stands at the version before or is new."""
    told = json.loads((VECTORS / "bad" / case / "case.json").read_text())
    local = tmp_path / "local"
    assert run(case, local, told["start"], capsys)[0] == 0
    before, published = snapshot(local), tree(VECTORS / "bad" / case)
    for place, files in ((local, before), (tmp_path / "new", {})):
        code, stderr = run(case, place, told["target"], capsys)
        assert code == 1
        assert stderr.count("\n") == 1
        # The path says the case's name, which is no proof.
        assert told["says"] in stderr.replace(str(VECTORS / "bad" / case), "")
        assert any(name in stderr for name in told["names"])
        assert stderr.startswith(f"gpusync: {told['error']}: ")
        assert issubclass(getattr(errors, told["error"]), GpusyncError)
        assert snapshot(place) == files
    assert tree(VECTORS / "bad" / case) == published
    assert run(case, local, told["start"], capsys)[0] == 0
    assert snapshot(local) == before


def test_the_generator_still_writes_these_vectors(tmp_path: Path) -> None:
    """The same files; the same text; the same bytes, where libzstd is the one they were made with."""
    subprocess.run([sys.executable, str(GOLDEN / "make_gpusync.py"), "--out", str(tmp_path)], check=True, timeout=120)
    kept = {path.relative_to(VECTORS): path for path in VECTORS.rglob("*") if path.is_file()}
    made = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    assert kept.keys() - {Path("README.md")} == made.keys()
    for name, path in made.items():
        if zstandard.ZSTD_VERSION == MADE_WITH_ZSTD or name.name in {"expected.json", "case.json"}:
            assert path.read_bytes() == kept[name].read_bytes(), name
