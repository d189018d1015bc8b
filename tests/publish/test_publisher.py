"""What is published is what readers end up with, byte for byte, and the files say what the format says they should."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

import gpusync
from gpusync.errors import LayoutError, PublishError
from gpusync.publish import CheckpointTensors, Publisher, StoredBytes
from gpusync.stream import INDEX_NAME, SourceFile, read_header, read_version, version_path
from support.checkpoints import Tensor, changed, read_state, write_checkpoint
from support.receiver import receive

encodings = pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])


@pytest.mark.parametrize(
    ("encoding", "checksum"),
    [("xor", "xxh3-128"), ("overwrite", "blake3"), ("gpusync", "adler32"), ("gpusync", "xxh3-128")],
)
def test_deltas_round_trip(site, offer, encoding, checksum):
    publisher = Publisher(site.source, base_dir=site.base, encoding=encoding, checksum=checksum)
    states = [site.state]
    for seed, share in enumerate((0.001, 0.02, 0.9), start=1):
        states.append(changed(states[-1], seed, share=share))
        report = publisher.publish(offer(states[-1]))
        assert (report.version, publisher.version, report.base_version) == (seed, seed, seed - 1)
    site.pull(3)
    assert site.local_state() == states[-1]
    if encoding != "gpusync":
        assert receive(site.state, site.source, 3) == states[-1]


def test_an_iterator_may_reuse_its_buffer(site, offer):
    after = changed(site.state, 1)
    buffer = np.empty(max(t.data.size for t in after.values()), np.uint8)

    def tensors() -> Iterator[tuple[str, StoredBytes]]:
        for name, t in after.items():
            buffer[: t.data.size] = t.data
            yield name, StoredBytes(dtype=t.dtype, shape=t.shape, data=buffer[: t.data.size])
            buffer[:] = 0

    Publisher(site.source, base_dir=site.base).publish(tensors())
    assert receive(site.state, site.source, 1) == after


def test_the_trainer_may_change_its_tensors_in_place_between_publishes(site):
    publisher = Publisher(site.source, base_dir=site.base)
    live = {name: Tensor(t.dtype, t.shape, t.data.copy()) for name, t in site.state.items()}
    offers = {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in live.items()}
    for version in (1, 2, 3):
        for name, t in changed(live, version, share=0.3 if version == 2 else 0.01).items():
            live[name].data[:] = t.data
        publisher.publish(offers)
        assert receive(site.state, site.source, version) == live


def test_a_checkpoint_directory_is_published_by_its_path_or_as_tensors(site, tmp_path):
    after = changed(site.state, 1)
    new = write_checkpoint(tmp_path / "new", after, shards=3)
    publisher = Publisher(site.source, base_dir=site.base)
    publisher.publish(new)
    with CheckpointTensors(new) as tensors:
        assert publisher.publish(tensors).tensors_changed == 0
    assert receive(site.state, site.source, 2) == after


def test_missing_tensors_are_unchanged(site, offer):
    publisher = Publisher(site.source, base_dir=site.base)
    first = changed(site.state, 1, names=["layer.0.weight"])
    second = changed(first, 2, names=["step"])
    publisher.publish(offer({"layer.0.weight": first["layer.0.weight"]}))
    publisher.publish(offer({"step": second["step"]}))
    assert receive(site.state, site.source, 2) == second


def test_a_version_may_change_nothing(site, offer, visible):
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2):
        report = publisher.publish(offer(site.state) if version == 1 else {})
        assert (report.tensors_changed, report.shards, report.density) == (0, 0, 0.0)
    assert visible(site.source / "weight_v000001") == [INDEX_NAME]
    assert json.loads((site.source / "weight_v000001" / INDEX_NAME).read_text())["weight_map"] == {}
    assert receive(site.state, site.source, 2) == site.state
    site.pull(2)
    assert site.local_state() == site.state


def test_deltas_are_made_against_the_bytes_of_the_base(site, offer):
    """A trainer's export of the very weights it loaded may differ in bytes; the engines hold the base's."""
    export = changed(site.state, 7, share=0.0001)
    Publisher(site.source, base_dir=site.base).publish(offer(export))
    assert receive(site.state, site.source, 1) == export


def test_a_tensor_the_base_lacks_falls_back_to_the_given_value(site, offer, caplog):
    caplog.set_level(logging.WARNING, "gpusync.publish")
    publisher = Publisher(site.source, base_dir=site.base)
    tied = {"lm_head.weight": Tensor("BF16", (4, 4), np.arange(32, dtype=np.uint8))}
    report = publisher.publish(offer({**site.state, **tied}))
    assert report.tensors_changed == 0
    (warning,) = report.warnings
    assert warning.startswith("NOT PUBLISHED: 1 of 8 tensors offered")
    assert "`lm_head.weight`" in warning
    assert warning in caplog.text
    assert publisher.publish(offer({**site.state, **tied})).warnings == ()
    # No reader could apply a delta for it.
    moved = changed(tied, 1)
    with pytest.raises(PublishError, match="publish a full version first") as caught:
        publisher.publish(offer({**site.state, **moved}))
    assert (caught.value.tensor, caught.value.version) == ("lm_head.weight", 3)
    publisher.publish_full(offer({**site.state, **moved}))
    again = changed(moved, 2)
    publisher.publish(offer(again))
    assert receive(site.state, site.source, 4) == {**site.state, **again}


def test_many_tensors_the_base_lacks_are_one_warning(site, offer):
    others = {f"model.{number:02d}": site.state["step"] for number in range(12)}
    (warning,) = Publisher(site.source, base_dir=site.base).publish(offer({**site.state, **others})).warnings
    assert "12 of 19 tensors" in warning
    assert "`model.09` and 2 more" in warning


@pytest.mark.parametrize("as_iterator", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_names_of_which_the_base_has_none_are_an_error(site, offer, visible, as_iterator, keep):
    """A wrapper's prefix on every name would publish nothing, version after version."""
    publisher = Publisher(site.source, base_dir=site.base, keep_snapshot=keep)
    offers = offer({f"module.{name}": t for name, t in changed(site.state, 1).items()})
    with pytest.raises(PublishError, match="publish_full can") as caught:
        publisher.publish(iter(offers.items()) if as_iterator else offers)
    assert (caught.value.tensor, caught.value.version) == ("module.embed.weight", 1)
    assert (str(caught.value.expected), caught.value.found) == ("tensors such as `embed.weight`", "7 others")
    assert (visible(site.source), publisher.version) == ([], 0)
    publisher.publish_full(offers)
    assert read_state(site.source / "weight_v000001").keys() == {*site.state, *offers}


@pytest.mark.parametrize("keep", [False, True])
def test_without_a_base_a_full_version_comes_first(site, offer, visible, keep):
    """The first values offered are not what readers hold: taken for it they would never reach them."""
    publisher = Publisher(site.source, keep_snapshot=keep)
    first, second = changed(site.state, 1), changed(site.state, 2)
    for offers in (offer(first), {}):
        with pytest.raises(PublishError, match=r"base_dir.*publish_full"):
            publisher.publish(offers)
    assert (visible(site.source), publisher.version) == ([], 0)
    publisher.publish_full(offer(first))
    publisher.publish(offer(second))
    assert receive(site.state, site.source, 2) == second
    Publisher(site.source, full_every=3, resume=True).publish(offer(first))
    assert receive(site.state, site.source, 3) == first


def test_bits_of_bfloat16_in_integers_are_told_what_to_do(site):
    bits = site.state["layer.0.weight"].data.view(np.uint16).reshape(64, 48) ^ 1
    publisher = Publisher(site.source, base_dir=site.base)
    with pytest.raises(LayoutError, match=r"StoredBytes\(dtype='BF16', shape=array.shape, data=array.tobytes\(\)\)"):
        publisher.publish({"layer.0.weight": bits})
    # Another shape is another mistake, and numpy has float32.
    for wrong in ({"layer.0.weight": bits.T}, {"layer.0.scale": np.zeros(48, np.int32)}):
        with pytest.raises(LayoutError) as caught:
            publisher.publish(wrong)
        assert "StoredBytes" not in str(caught.value)
    stored = gpusync.StoredBytes(dtype="BF16", shape=bits.shape, data=bits.tobytes())
    publisher.publish({"layer.0.weight": stored})
    assert receive(site.state, site.source, 1)["layer.0.weight"].data.tobytes() == bits.tobytes()


def test_what_is_offered_has_names_of_the_package():
    assert {"CheckpointTensors", "StoredBytes"} <= set(gpusync.__all__)
    assert (gpusync.CheckpointTensors, gpusync.StoredBytes) == (CheckpointTensors, StoredBytes)


@pytest.mark.parametrize(
    ("wrong", "expected", "found"),
    [
        (Tensor("BF16", (48, 64), np.zeros(6144, np.uint8)), "BF16[64, 48]", "BF16[48, 64]"),
        (Tensor("F16", (64, 48), np.zeros(6144, np.uint8)), "BF16[64, 48]", "F16[64, 48]"),
        (Tensor("BF16", (64, 47), np.zeros(6016, np.uint8)), "BF16[64, 48]", "BF16[64, 47]"),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_another_shape_or_dtype_is_refused_by_name(site, offer, visible, wrong, expected, found, full):
    publisher = Publisher(site.source, base_dir=site.base)
    publish = publisher.publish_full if full else publisher.publish
    with pytest.raises(LayoutError) as caught:
        publish(offer({**site.state, "layer.0.weight": wrong}))
    assert (caught.value.tensor, str(caught.value.expected), str(caught.value.found)) == (
        "layer.0.weight",
        expected,
        found,
    )
    assert (visible(site.source), publisher.version) == ([], 0)


def test_a_tensor_offered_twice_by_one_rank_is_refused(site, offer):
    pairs = list(offer(site.state).items())
    with pytest.raises(PublishError, match="twice"):
        Publisher(site.source, base_dir=site.base).publish([*pairs, pairs[0]])


@encodings
def test_a_delta_says_what_it_is(site, offer, encoding):
    publisher = Publisher(site.source, base_dir=site.base, encoding=encoding, checksum="blake3")
    publisher.publish(offer(changed(site.state, 1)), version=41)
    publisher.publish(offer(changed(site.state, 2)), version=42)
    index = json.loads((site.source / "weight_v000042" / INDEX_NAME).read_text())
    metadata = index["metadata"]
    shard_bytes = {p.name: p.stat().st_size for p in (site.source / "weight_v000042").glob("*.safetensors")}
    checksums = metadata.pop("payload_checksums")
    assert metadata == {
        "version": "000042",
        "base_version": "000041",
        "delta_encoding": encoding,
        "compression_format": "none" if encoding == "gpusync" else "zstd",
        "checksum_format": "blake3",
        "stream_id": publisher.stream_id,
        "shard_bytes": shard_bytes,
    }
    assert checksums.keys() == index["weight_map"].keys()
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in checksums.values())
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", publisher.stream_id)
    forms = set()
    for name in shard_bytes:
        with SourceFile(site.source / "weight_v000042" / name) as file:
            header = read_header(file)
            assert header.metadata.keys() == header.tensors.keys()
            assert all(re.fullmatch("[0-9a-f]{64}", value) for value in header.metadata.values())
            for tensor in header.tensors.values():
                form = bytes(file.read_at(tensor.offset, 4))
                forms.add(form)
                assert form not in (b"GS01", b"GF01") or tensor.offset % 8 == 0
    assert encoding != "gpusync" or forms == {b"GS01", b"GP01"}


def test_a_full_version_is_a_checkpoint_and_says_more(site, offer):
    publisher = Publisher(site.source, base_dir=site.base)
    after = changed(site.state, 1)
    report = publisher.publish_full(offer(after))
    directory = site.source / "weight_v000001"
    assert read_state(directory) == after
    metadata = json.loads((directory / INDEX_NAME).read_text())["metadata"]
    assert {"version", "checksum_format", "stream_id", "shard_bytes", "payload_checksums", "total_size"} == set(
        metadata
    )
    assert metadata["total_size"] == sum(t.data.size for t in after.values())
    (shard,) = metadata["shard_bytes"]
    with SourceFile(directory / shard) as file:
        header = read_header(file)
    assert header.metadata.keys() == {*after, "format"}
    assert header.metadata["format"] == "pt"
    for tensor in header.tensors.values():
        assert (
            tensor.offset % (8 if tensor.nbytes % 8 == 0 else {"F16": 2, "BF16": 2, "F32": 4}.get(tensor.dtype, 1)) == 0
        )
    assert (report.kind, report.base_version, report.encoding, report.forms) == ("full", None, None, {"full": 7})
    site.pull(1)
    assert site.local_state() == after


def test_full_and_delta_versions_alternate(site, offer):
    publisher = Publisher(site.source, base_dir=site.base, full_every=3)
    state, kinds = site.state, []
    for version in range(1, 8):
        state = changed(state, version)
        kinds.append(publisher.publish(offer(state)).kind)
        assert receive(site.state, site.source, version) == state
    assert kinds == ["delta", "delta", "full", "delta", "delta", "full", "delta"]
    site.pull(7)
    assert site.local_state() == state


def test_a_full_version_fills_in_what_was_not_offered(site, offer):
    publisher = Publisher(site.source, base_dir=site.base)
    first = changed(site.state, 1, names=["step", "layer.0.scale"])
    publisher.publish(offer({"step": first["step"], "layer.0.scale": first["layer.0.scale"]}))
    second = changed(first, 2, names=["layer.1.weight"])
    publisher.publish_full(offer({"layer.1.weight": second["layer.1.weight"]}))
    assert read_state(site.source / "weight_v000002") == second
    third = changed(second, 3)
    publisher.publish(offer(third))
    assert receive(site.state, site.source, 3) == third


def test_side_files_follow_but_no_index_and_no_code(site, offer, tmp_path):
    extra = tmp_path / "tokenizer"
    extra.mkdir()
    (tmp_path / "real.json").write_text("linked")
    (extra / "linked.json").symlink_to(tmp_path / "real.json")
    for name in ("config.json", "merges.txt", "spiece.model", "chat.jinja", "modeling_x.py", "a.index.json", "x.bin"):
        (extra / name).write_text(name)
    (extra / "dir.json").mkdir()
    publisher = Publisher(site.source, base_dir=site.base)
    publisher.publish_full(offer(site.state), side_files=extra)
    beside = {p.name for p in (site.source / "weight_v000001").iterdir() if p.suffix != ".safetensors"}
    assert beside == {"config.json", "merges.txt", "spiece.model", "chat.jinja", "linked.json", INDEX_NAME}
    publisher.publish_full(offer(site.state))
    assert (site.source / "weight_v000002" / "config.json").read_text() == '{"model_type": "tiny"}'


def test_shards_are_cut_by_their_payloads(site, offer):
    publisher = Publisher(site.source, base_dir=site.base, shard_bytes=5000)
    after = changed(site.state, 1, share=0.5)
    report = publisher.publish_full(offer(after))
    assert report.shards == 3
    assert read_state(site.source / "weight_v000001") == after
    version = read_version(site.source, 1)
    assert version.wire_bytes == report.wire_bytes
    assert sum(h.file_bytes for h in version.headers.values()) == sum(version.index.shard_bytes.values())


def test_memory_is_bounded_by_workers_and_shards_not_by_the_model(tmp_path):
    """48 tensors of 1 MiB, all of them changed: far less than the model is held, in either direction."""
    count, nbytes = 48, 1 << 20
    rng = np.random.default_rng(0)
    base = {f"w{i:03d}": Tensor("U8", (1, nbytes), rng.integers(0, 256, nbytes, np.uint8)) for i in range(count)}
    write_checkpoint(tmp_path / "base", base, shards=8)
    del base

    def tensors() -> Iterator[tuple[str, StoredBytes]]:
        for i in range(count):
            yield f"w{i:03d}", StoredBytes(dtype="U8", shape=(1, nbytes), data=rng.integers(0, 256, nbytes, np.uint8))

    for full in (False, True):
        source = tmp_path / f"stream{full}"
        publisher = Publisher(
            source,
            base_dir=tmp_path / "base",
            workers=2,
            shard_bytes=4 * nbytes,
            keep_snapshot=False,
            encoding="gpusync",
        )
        tracemalloc.start()
        report = publisher.publish_full(tensors()) if full else publisher.publish(tensors())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.tensors_changed == count
        assert peak < 20 * nbytes


def test_the_report_counts(site, offer):
    publisher = Publisher(site.source, base_dir=site.base, shard_bytes=1)
    data = {name: site.state[name].data.copy() for name in ("step", "layer.0.codes")}
    data["step"][[0, 23]] ^= 1
    data["layer.0.codes"][[0, 8, 526]] ^= 255
    after = {name: Tensor(site.state[name].dtype, site.state[name].shape, data[name]) for name in data}
    report = publisher.publish(offer({**site.state, **after}))
    total = sum(t.data.size for t in site.state.values())
    assert (report.tensors_offered, report.tensors_changed, report.bytes_offered, report.bytes_changed) == (
        7,
        2,
        total,
        5,
    )
    assert report.density == 5 / total
    assert (report.shards, report.forms, report.ranks, report.checksum) == (
        2,
        {"GP01": 2},
        1,
        "xxh3-128",
    )
    files = list(version_path(site.source, 1).iterdir())
    assert report.wire_bytes == sum(path.stat().st_size for path in files)
    assert report.path == str(version_path(site.source, 1))
    assert {"offer", "read", "compare", "encode", "digest", "write", "hook", "total"} == set(report.seconds)
    assert all(seconds >= 0 for seconds in report.seconds.values())


@pytest.mark.parametrize(
    "settings",
    [{"encoding": "zzz"}, {"checksum": "crc7"}, {"shard_bytes": 0}, {"full_every": -1}],
    ids=lambda settings: next(iter(settings)),
)
def test_wrong_settings_are_refused_at_once(site, settings):
    with pytest.raises(PublishError):
        Publisher(site.source, base_dir=site.base, **settings)


def test_two_publishers_are_two_streams(site):
    assert Publisher(site.source).stream_id != Publisher(site.source).stream_id
    assert Publisher(site.source, stream_id="run-7").stream_id == "run-7"


def test_a_full_version_of_byte_vectors_only_is_refused(tmp_path, visible):
    only = {"a": StoredBytes(dtype="U8", shape=(4,), data=b"1234")}
    with pytest.raises(PublishError, match="byte vectors"):
        Publisher(tmp_path / "stream").publish_full(only)
    assert visible(tmp_path / "stream") == []
