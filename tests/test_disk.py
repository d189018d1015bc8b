"""The disk path as its callers see it: what `pull` leaves behind, and what it refuses with everything as it was."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from gpusync import PullReport
from gpusync.disk import plan
from gpusync.errors import (
    ChainError,
    DigestMismatchError,
    GpusyncError,
    HookError,
    LockTimeoutError,
    MirrorError,
    PayloadError,
    VersionMissingError,
)
from gpusync.mirror.lock import local_lock
from gpusync.mirror.verify import verify_directory
from support.checkpoints import INDEX, State, Tensor, changed, encode_shard, snapshot, write_checkpoint
from support.slime import publish_delta, publish_full, version_dir


def history(site, count: int, *, encoding: str = "xor", names: list[str] | None = None) -> list[State]:
    """Publish versions 1..count, each a delta on the one before; returns the states of 0..count."""
    states = [site.state]
    for version in range(1, count + 1):
        states.append(changed(states[-1], version, names=names))
        publish_delta(site.source, version, states[-2], states[-1], encoding=encoding)
    return states


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_a_fresh_and_a_lagging_directory_come_to_the_target(site, encoding: str, checksum: str) -> None:
    states = [site.state]
    for version in range(1, 5):
        states.append(changed(states[-1], version))
        publish_delta(site.source, version, states[-2], states[-1], encoding=encoding, checksum=checksum, shards=2)
    fresh = site.pull(4)
    assert (fresh.seed, fresh.seed_version, fresh.chain) == ("base", 0, (1, 2, 3, 4))
    assert site.local_state() == states[4]
    shutil.rmtree(site.local)
    site.pull(1)
    lagging = site.pull(4)
    assert (lagging.seed, lagging.seed_version, lagging.chain) == ("store", 1, (2, 3, 4))
    assert site.local_state() == states[4]


def test_the_report_counts_what_happened(site) -> None:
    states = history(site, 1, names=["layer.0.weight", "layer.1.weight"])
    site.pull(0)
    report = site.pull(1)
    old, new = ([s[n].data.view("<u2") for n in ("layer.0.weight", "layer.1.weight")] for s in states)
    assert report.tensors_changed == 2
    assert report.elements_changed == sum(int((a != b).sum()) for a, b in zip(old, new, strict=True))
    assert report.tensor_bytes == sum(a.nbytes for a in old)
    assert (report.version_before, report.decoder, report.path) == (0, "host", "disk")
    assert set(report.seconds) == {"lock", "open", "validate", "prepare", "commit", "total"}
    assert PullReport.from_json(report.as_json()) == report


def test_a_version_in_which_nothing_changed_touches_no_file(site) -> None:
    publish_delta(site.source, 1, site.state, site.state)
    site.pull(0)
    before = {path.name: path.stat().st_mtime_ns for path in site.local.iterdir() if path.is_file()}
    report = site.pull(1)
    assert {path.name: path.stat().st_mtime_ns for path in site.local.iterdir() if path.is_file()} == before
    assert (report.target_version, report.changed) == (1, False)
    assert json.loads((site.control / "state.json").read_text())["version"] == "000001"


def test_pulling_the_same_version_again_does_nothing(site) -> None:
    history(site, 2)
    first = site.pull(2)
    before = site.local_files()
    again = site.pull(2)
    assert again.shared
    assert again.chain == first.chain
    assert site.local_files() == before


def test_version_zero_is_the_base_whatever_stood_there(site) -> None:
    history(site, 2)
    site.pull(2)
    report = site.pull(0)
    assert report.seed == "base"
    assert site.local_state() == site.state
    assert not site.pull(0).changed or site.pull(0).shared


def test_version_zero_follows_a_base_that_changed(make_site) -> None:
    site = make_site()
    site.pull(0)
    other = changed(site.state, 99)
    shutil.rmtree(site.base)
    publish_full(site.base.parent / "x", 1, other).rename(site.base)
    site.pull(0)
    assert site.local_state() == other


def test_the_state_file_is_slimes_and_theirs_is_ours(site) -> None:
    states = history(site, 2)
    shutil.copytree(site.base, site.local)
    site.control.mkdir()
    (site.control / "state.json").write_text('{"version": "000000"}')
    report = site.pull(2)
    assert report.seed == "store"
    assert site.local_state() == states[2]
    assert json.loads((site.control / "state.json").read_text())["version"] == "000002"


def test_a_local_checkpoint_without_state_is_reseeded(site) -> None:
    states = history(site, 1)
    shutil.copytree(site.base, site.local)
    report = site.pull(1)
    assert (report.seed, report.version_before) == ("base", None)
    assert "no state" in report.reason
    assert site.local_state() == states[1]


class TestFullVersions:
    def test_a_full_version_replaces_shards_tensors_and_side_files(self, make_site) -> None:
        site = make_site(tokenizer_json="base tokenizer", merges_txt="merges")
        site.pull(0)
        new = {name: t for name, t in changed(site.state, 5).items() if name != "step"}
        publish_full(site.source, 1, new, files={"tokenizer.json": "new tokenizer", "chat_template.jinja": "hello"})
        (version_dir(site.source, 1) / "extra-of-nobody.bin").write_text("stays")
        later = changed(new, 6)
        publish_delta(site.source, 2, new, later)
        report = site.pull(2)
        assert (report.seed, report.seed_version, report.chain) == ("full", 1, (2,))
        assert site.local_state() == later
        assert (site.local / "tokenizer.json").read_text() == "new tokenizer"
        assert (site.local / "chat_template.jinja").read_text() == "hello"
        assert (site.local / "merges.txt").read_text() == "merges"
        assert not (site.local / "extra-of-nobody.bin").exists()

    def test_files_of_the_version_before_are_pruned_and_others_are_not(self, site) -> None:
        site.pull(0)
        (site.local / "notes.md").write_text("mine")
        full = publish_full(site.source, 1, site.state)
        (full / INDEX).unlink()
        for path in full.glob("*.safetensors"):
            path.unlink()
        entries = [(name, t.dtype, t.shape, t.data.tobytes()) for name, t in site.state.items()]
        (full / "model.safetensors").write_bytes(encode_shard(entries, None))
        site.pull(1)
        assert {path.name for path in site.local.iterdir()} == {
            ".weight_sync", "config.json", "model.safetensors", "notes.md",
        }  # fmt: skip

    def test_code_follows_only_when_asked(self, site) -> None:
        publish_full(site.source, 1, site.state, files={"modeling_evil.py": "boom"})
        site.pull(1)
        assert not (site.local / "modeling_evil.py").exists()
        site.pull(0)
        site.pull(1, copy_code=True)
        assert (site.local / "modeling_evil.py").read_text() == "boom"

    def test_a_linked_side_file_of_a_version_is_not_followed(self, site, tmp_path: Path) -> None:
        secret = tmp_path / "secret.txt"
        secret.write_text("secret")
        (publish_full(site.source, 1, site.state) / "notes.txt").symlink_to(secret)
        site.pull(1)
        assert not (site.local / "notes.txt").exists()


class TestRefusals:
    """Each leaves every byte as it was, and the next pull succeeds."""

    def refused(self, site, error: type[GpusyncError], target: int, **options) -> GpusyncError:
        before = site.local_files()
        with pytest.raises(error) as caught:
            site.pull(target, **options)
        assert site.local_files() == before
        assert not (site.control / "journal.json").exists()
        assert not list(site.control.glob("redo/*"))
        assert not list(site.control.glob("incoming/*"))
        return caught.value

    def test_a_wrong_checksum(self, site) -> None:
        site.pull(0)
        new = changed(site.state, 1)
        publish_delta(site.source, 1, site.state, new, checksums={"layer.0.codes": "0" * 32})
        error = self.refused(site, DigestMismatchError, 1)
        assert (error.tensor, error.version, error.expected) == ("layer.0.codes", 1, "0" * 32)
        assert error.path is not None
        assert error.path.endswith("model-00000-of-00001.safetensors")
        shutil.rmtree(version_dir(site.source, 1))
        publish_delta(site.source, 1, site.state, new)
        site.pull(1)
        assert site.local_state() == new

    def test_a_damaged_payload_in_the_last_tensor_of_a_long_chain(self, site) -> None:
        states = history(site, 2)
        site.pull(1)
        shutil.rmtree(version_dir(site.source, 2))
        publish_delta(site.source, 2, states[1], states[2], payloads={"step": b"not zstd"})
        assert self.refused(site, PayloadError, 2).tensor == "step"

    def test_a_wrong_checksum_while_seeding(self, site) -> None:
        publish_delta(site.source, 1, site.state, changed(site.state, 1), checksums={"step": "f" * 32})
        with pytest.raises(DigestMismatchError):
            site.pull(1)
        assert list(site.local.iterdir()) == [site.control]

    def test_a_target_behind(self, site) -> None:
        states = history(site, 3)
        site.pull(3)
        self.refused(site, ChainError, 2)
        report = site.pull(2, allow_rewind=True)
        assert report.seed == "base"
        assert site.local_state() == states[2]

    def test_a_missing_version(self, site) -> None:
        site.pull(0)
        assert self.refused(site, VersionMissingError, 7).version == 7

    def test_a_hook_that_fails(self, site) -> None:
        history(site, 1)
        site.pull(0)

        def hook(source_dir: str, target_version: int) -> None:
            raise OSError("the volume is gone")

        assert "the volume is gone" in str(self.refused(site, HookError, 1, pre_read_hook=hook))

    def test_somebody_elses_files(self, site) -> None:
        site.local.mkdir()
        (site.local / "thesis.docx").write_text("years of work")
        error = self.refused(site, MirrorError, 0)
        assert error.found == "thesis.docx"

    @pytest.mark.parametrize("torn", [False, True])
    def test_somebody_elses_checkpoint(self, site, torn: bool) -> None:
        write_checkpoint(site.local, {"my.precious": site.state["step"]}, files={"tokenizer.json": "mine"})
        if torn:
            os.truncate(site.local / "model-00001-of-00002.safetensors", 20)
        error = self.refused(site, MirrorError, 0)
        assert "not ours" in str(error) or "neither ours" in str(error)
        self.refused(site, MirrorError, 0)

    @pytest.mark.parametrize("place", ["base", "source", "inside the base", "around the source"])
    def test_overlapping_directories(self, site, place: str) -> None:
        site.local = {
            "base": site.base,
            "source": site.source,
            "inside the base": site.base / "local",
            "around the source": site.source.parent,
        }[place]
        with pytest.raises(MirrorError, match="overlap"):
            site.pull(0)
        assert site.base.joinpath(INDEX).exists()

    def test_a_network_filesystem(self, site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpusync.mirror.local.filesystem_type", lambda _: "fuse.s3fs")
        with pytest.raises(MirrorError, match="local filesystem") as caught:
            site.pull(0)
        assert caught.value.found == "fuse.s3fs"
        assert not site.local.exists()


class TestDamage:
    """The local checkpoint is not what its state says: noticed, explained, and replaced."""

    def file_of(self, site, name: str) -> tuple[Path, int]:
        """The shard that holds a tensor, and where its bytes begin."""
        path = site.local / json.loads((site.local / INDEX).read_text())["weight_map"][name]
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        return path, 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]

    def flip(self, path: Path, at: int, *, keep_time: bool) -> None:
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        if keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @pytest.mark.parametrize("keep_time", [True, False], ids=["bit rot", "edited"])
    def test_a_flipped_bit_under_a_tensor_that_changes(self, site, keep_time: bool) -> None:
        states = history(site, 2)
        site.pull(1)
        self.flip(*self.file_of(site, "layer.0.weight"), keep_time=keep_time)
        report = site.pull(2)
        assert report.seed == "base"
        assert "layer.0.weight" in report.reason
        assert site.local_state() == states[2]

    def test_an_edit_is_noticed_though_nothing_is_to_be_pulled(self, site) -> None:
        states = history(site, 1)
        site.pull(1)
        self.flip(*self.file_of(site, "step"), keep_time=False)
        assert site.pull(1).seed == "base"
        assert site.local_state() == states[1]

    def test_a_touched_file_with_the_right_bytes_is_kept(self, site) -> None:
        history(site, 2)
        site.pull(1)
        for path in site.local.glob("*.safetensors"):
            os.utime(path)
        assert site.pull(2).seed == "store"

    def test_a_truncated_shard(self, site) -> None:
        states = history(site, 2)
        site.pull(1)
        path, _ = self.file_of(site, "step")
        os.truncate(path, path.stat().st_size - 1)
        report = site.pull(2)
        assert "shorter than its header says" in report.reason
        assert site.local_state() == states[2]

    @pytest.mark.parametrize("name", [INDEX, "model-00001-of-00002.safetensors", "config.json"])
    def test_a_missing_file(self, site, name: str) -> None:
        states = history(site, 2)
        site.pull(1)
        (site.local / name).unlink()
        assert site.pull(2).seed == "base"
        assert site.local_state() == states[2]
        assert (site.local / name).exists()

    @pytest.mark.parametrize("text", ["", "{", '{"version": "x"}', "[]", '{"version": "000001", "files": 3}'])
    def test_a_damaged_state_file(self, site, text: str) -> None:
        states = history(site, 2)
        site.pull(1)
        (site.control / "state.json").write_text(text)
        assert site.pull(2).seed == "base"
        assert site.local_state() == states[2]

    def test_verify_finds_what_pull_would(self, site) -> None:
        history(site, 1)
        site.pull(1)
        assert verify_directory(site.local).damage is None
        self.flip(*self.file_of(site, "layer.0.weight"), keep_time=True)
        found = verify_directory(site.local)
        assert found.damage is not None
        assert "layer.0.weight" in found.damage


class TestLinks:
    """A local shard that is a link, soft or hard, is replaced and never written through."""

    @pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
    def test_a_linked_shard(self, site, link) -> None:
        states = history(site, 1)
        site.pull(0)
        outside = site.base.parent / "hub"
        outside.mkdir()
        for path in site.local.glob("*.safetensors"):
            path.rename(outside / path.name)
            link(outside / path.name, path)
        kept = snapshot(outside)
        report = site.pull(1)
        assert report.seed == "store"
        assert site.local_state() == states[1]
        assert snapshot(outside) == kept
        assert not any(path.is_symlink() for path in site.local.iterdir())

    def test_a_base_of_links_as_hub_caches_are(self, site) -> None:
        states = history(site, 1)
        blobs = site.base.parent / "blobs"
        blobs.mkdir()
        for number, path in enumerate(sorted(site.base.iterdir())):
            path.rename(blobs / str(number))
            path.symlink_to(blobs / str(number))
        site.pull(1)
        assert site.local_state() == states[1]
        assert not any(path.is_symlink() for path in site.local.iterdir())


class TestRestartedTrainer:
    def test_other_weights_under_the_same_numbers(self, site) -> None:
        """The local directory is kept, the trainer starts over from the base: no old byte survives."""
        history(site, 3)
        site.pull(3)
        shutil.rmtree(site.source)
        site.source.mkdir()
        states = [site.state]
        for version in range(1, 4):
            states.append(changed(states[-1], 100 + version, names=["layer.1.weight", "step"]))
            publish_delta(site.source, version, states[-2], states[-1])
        for version in (1, 3):
            report = site.pull(version)
            assert site.local_state() == states[version]
        assert report.chain == (2, 3)

    def test_another_stream_id_behind_a_pruned_start(self, site) -> None:
        states = [site.state]
        for version in (1, 2):
            states.append(changed(states[-1], version))
            publish_delta(
                site.source, version, *states[-2:], metadata={"stream_id": "11111111-0000-4000-8000-000000000000"}
            )
        site.pull(2)
        shutil.rmtree(site.source)
        new = changed(site.state, 77)
        later = changed(new, 78)
        publish_full(site.source, 2, new)
        publish_delta(site.source, 3, new, later, metadata={"stream_id": "22222222-0000-4000-8000-000000000000"})
        report = site.pull(3)
        assert report.seed == "full"
        assert "restarted" in report.reason
        assert site.local_state() == later


class TestVisibility:
    def test_the_hook_runs_before_the_first_look(self, site) -> None:
        seen = []

        def hook(source_dir: str, target_version: int) -> None:
            seen.append((source_dir, target_version))
            if not version_dir(site.source, 1).exists():
                history(site, 1)

        site.pull(1, pre_read_hook=hook)
        assert seen == [(str(site.source), 1)]

    def test_version_zero_needs_no_hook(self, site) -> None:
        site.pull(0, pre_read_hook=lambda *_: pytest.fail("called"))

    def test_a_version_that_appears_within_the_timeout(self, site) -> None:
        hidden = site.source.parent / "hidden"
        states = history(site, 1)
        (version_dir(site.source, 1) / INDEX).rename(hidden)
        timer = threading.Timer(0.3, lambda: hidden.rename(version_dir(site.source, 1) / INDEX))
        timer.start()
        site.pull(1, visibility_timeout=20)
        timer.join()
        assert site.local_state() == states[1]

    def test_a_version_that_does_not(self, site) -> None:
        history(site, 1)
        (version_dir(site.source, 1) / "model-00000-of-00001.safetensors").unlink()
        began = time.monotonic()
        with pytest.raises(VersionMissingError, match=r"model-00000-of-00001\.safetensors"):
            site.pull(1, visibility_timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 10


class TestSeveralCallers:
    def test_threads_that_call_at_once_collapse_to_one_pull(self, site) -> None:
        states = history(site, 2)
        site.pull(0)
        reports: list[PullReport] = []
        threads = [threading.Thread(target=lambda: reports.append(site.pull(2))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.shared for r in reports].count(False) == 1
        assert {r.chain for r in reports} == {(1, 2)}
        assert site.local_state() == states[2]

    def test_waiting_for_the_lock_ends_with_its_holders_name(self, site) -> None:
        site.pull(0)
        with (
            local_lock(site.control, timeout_s=1),
            pytest.raises(LockTimeoutError, match=rf"process {os.getpid()} on ") as caught,
        ):
            site.pull(0, lock_timeout=0.2)
        assert caught.value.path == str(site.local)


def test_plan_tells_and_changes_nothing(site) -> None:
    history(site, 3)
    places = {"local_checkpoint_dir": site.local, "base_dir": site.base, "source_dir": site.source}
    assert plan(target_version=3, **places).chain == (1, 2, 3)
    assert not site.local.exists()
    site.pull(1)
    before = snapshot(site.control)
    found = plan(target_version=3, **places)
    assert (found.seed, found.chain) == ("store", (2, 3))
    assert snapshot(site.control) == before


def test_progress_ends_at_its_total(site) -> None:
    history(site, 1)
    told: list[tuple[int, int]] = []
    site.pull(1, progress=lambda done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] == sum(t.data.size for t in site.state.values())


def test_memory_does_not_grow_with_the_tensor(make_site) -> None:
    """One tensor of many windows, every byte changed: nothing as large as the tensor is ever allocated."""
    data = np.random.default_rng(0).integers(0, 256, 64 * 2**20, dtype=np.uint8)
    site = make_site({"w": Tensor("BF16", (32 * 2**20,), data)})
    new = {"w": Tensor("BF16", (32 * 2**20,), data ^ 1)}
    publish_delta(site.source, 1, site.state, new)
    site.pull(0)
    tracemalloc.start()
    site.pull(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert site.local_state() == new
    assert peak < 40 * 2**20
