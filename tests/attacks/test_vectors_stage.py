"""Golden streams: every bad one whose fault can be seen without decoding is refused, every sound one is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpusync.digest import digest_of
from gpusync.errors import GpusyncError, StreamError
from gpusync.stream import (
    Checkpoint,
    OpenFiles,
    StoredTensor,
    check_against,
    compare_duplicates,
    list_versions,
    read_checkpoint,
    read_index,
    read_version,
)

VECTORS = Path(__file__).parents[1] / "golden" / "vectors"
# A link of the chain is missing, which only a plan over several versions can see.
NEEDS_A_PLAN = {"chain_gap"}
# Seen before decoding although the vectors place them later: a missing checksum, a payload far too long for its tensor.
SEEN_EARLY = {"checksum_missing", "checksums_missing", "zstd_bomb"}


def cases() -> dict[str, dict[str, object]]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(VECTORS.glob("bad/*/case.json"))}


CASES = cases()
VISIBLE = {
    name
    for name, case in CASES.items()
    if (case["stage"] in ("index", "header", "chain") and name not in NEEDS_A_PLAN) or name in SEEN_EARLY
}
STREAMS = sorted(path.name for path in VECTORS.glob("streams/*"))


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return read_checkpoint(VECTORS / "base")


def validate(source_dir: Path, version: int, base: Checkpoint) -> None:
    published = read_version(source_dir, version)
    check_against(published, base.tensors)
    with OpenFiles() as files:
        compare_duplicates(published, files)


def test_the_vectors_are_all_here() -> None:
    assert (len(CASES), len(VISIBLE), len(STREAMS)) == (57, 44, 11)


@pytest.mark.parametrize("name", sorted(VISIBLE))
def test_fault_is_refused_by_name(name: str, base: Checkpoint) -> None:
    case = CASES[name]
    with pytest.raises(GpusyncError) as caught:
        validate(VECTORS / "bad" / name / "source", int(str(case["target"])), base)
    names = case["names"]
    assert isinstance(names, list)
    assert any(text in str(caught.value) for text in names), caught.value
    assert caught.value.version == case["target"]


@pytest.mark.parametrize("name", sorted(set(CASES) - VISIBLE))
def test_fault_of_a_payload_is_left_to_the_decoder(name: str, base: Checkpoint) -> None:
    validate(VECTORS / "bad" / name / "source", int(str(CASES[name]["target"])), base)


@pytest.mark.parametrize("name", STREAMS)
def test_sound_stream_is_read(name: str) -> None:
    source_dir = VECTORS / "streams" / name
    expected = json.loads((source_dir / "expected.json").read_text())["versions"]
    assert [f"{version}" for version in list_versions(source_dir)] == sorted(expected, key=int)
    for version in list_versions(source_dir):
        published = read_version(source_dir, version)
        assert published.index == read_index(source_dir, version)
        assert published.tensors.keys() == published.index.weight_map.keys()
        assert not published.duplicates
        on_disk = sum(path.stat().st_size for path in published.path.iterdir() if path.name in published.headers)
        assert published.wire_bytes == on_disk + published.index.index_bytes
        state = expected[str(version)]["tensors"]
        if not published.is_delta:
            assert described(published.tensors) == {name: facts[0] for name, facts in state.items()}
        elif published.index.checksum_format == "xxh3-128":
            told = {tensor.name: tensor.checksum for tensor in published.tensors.values()}
            assert told.items() <= {name: facts[1] for name, facts in state.items()}.items()
        else:
            assert published.tensors.keys() <= state.keys()


def described(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    return {t.name: f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in tensors.values()}


def test_base_holds_every_kind_of_tensor(base: Checkpoint) -> None:
    expected = json.loads((VECTORS / "base.expected.json").read_text())["versions"]["0"]["tensors"]
    assert described(base.tensors) == {name: facts[0] for name, facts in expected.items()}
    assert len(base.tensors) == 46
    with OpenFiles() as files:
        for name, (_, digest, _) in expected.items():
            data = bytearray(base.tensors[name].nbytes)
            with base.open_tensor(name, files) as source:
                source.read_into(0, data)
            assert digest_of("xxh3-128", data) == digest


def test_link_out_of_the_source_directory_is_refused(tmp_path: Path) -> None:
    """The vector as it was meant: version control may turn a link into a file that holds its target."""
    source = VECTORS / "bad" / "shard_is_symlink"
    outside = source / "outside.safetensors"
    directory = tmp_path / "source" / "weight_v000001"
    directory.mkdir(parents=True)
    for path in (source / "source" / "weight_v000001").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    shard = directory / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(StreamError) as caught:
        read_version(tmp_path / "source", 1)
    assert (caught.value.path, caught.value.version) == (str(shard), 1)
    assert caught.value.found == "a symbolic link"
    assert len(read_version(tmp_path / "source", 1, follow_links=True).tensors) == 6
