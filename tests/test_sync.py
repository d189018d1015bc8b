"""Weight synchronisation of a model that serves, alone: attach, prepare, commit, and what it falls back to."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gpusync import Publisher
from gpusync.errors import ChainError, DigestMismatchError, PayloadError, RefusedError
from gpusync.store.rank import RankStore
from gpusync.store.update import PreparedUpdate
from gpusync.sync.report import STAGES
from support.checkpoints import read_state
from support.engines import as_state, step
from support.models import ModelConfig, fresh_load, tensor_bytes
from support.models_apply import assert_same
from support.models_layers import Ranks
from support.slime import publish_full
from support.solo import CONFIG, Engine


@pytest.fixture
def engine(tmp_path: Path):
    engine = Engine(tmp_path)
    yield engine
    engine.sync.close()


def test_attach_finds_the_base_live(engine: Engine) -> None:
    assert engine.sync.version == 0


def test_versions_are_committed_in_place(engine: Engine) -> None:
    addresses = {name: tensor.data_ptr() for name, tensor in engine.model.named_parameters()}
    for encoding in ("xor", "overwrite", "xor"):
        version = engine.publish(encoding=encoding)
        report = engine.sync.pull(version)
        assert report.commit_path == "in place"
        assert report.chain == (version,)
        engine.assert_live(version)
    assert {name: tensor.data_ptr() for name, tensor in engine.model.named_parameters()} == addresses


@pytest.mark.parametrize(("form", "most_packed"), [("GP01", 1 << 13), ("GS01", 0)])
def test_steps_arrive_packed_and_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, form: str, most_packed: int
) -> None:
    """What our publisher makes of small changes, and what it would make of many."""
    monkeypatch.setattr("gpusync.codec.gs01_encode.MAX_PACKED_CHANGES", most_packed)
    publisher = Publisher(engine.root / "stream", base_dir=engine.root / "base", encoding="gpusync")
    for version in (1, 2):
        engine.states.append(step(engine.states[-1], version))
        assert publisher.publish(engine.states[-1].items()).forms[form] >= 10
    report = engine.sync.pull(2)
    assert (report.chain, report.commit_path) == ((1, 2), "in place")
    engine.assert_live(2)


def test_a_lagging_engine_takes_several_versions_at_once(engine: Engine) -> None:
    for encoding in ("xor", "overwrite", "xor", "overwrite"):
        engine.publish(encoding=encoding)
    report = engine.sync.pull(4)
    assert (report.chain, report.commit_path) == ((1, 2, 3, 4), "in place")
    engine.assert_live(4)


def test_prepare_makes_durable_and_writes_nothing_live(engine: Engine) -> None:
    engine.publish()
    prepared = engine.sync.prepare(1)
    engine.assert_live(0)
    assert engine.sync.durable_version == 1
    assert engine.sync.prepare(1) is prepared
    engine.sync.commit(prepared)
    engine.assert_live(1)


def test_a_new_prepare_drops_the_pending_one(engine: Engine) -> None:
    engine.publish()
    first = engine.sync.prepare(1)
    engine.publish()
    second = engine.sync.prepare(2)
    with pytest.raises(RefusedError):
        engine.sync.commit(first)
    engine.sync.commit(second)
    engine.assert_live(2)


def test_a_bad_version_changes_nothing_and_the_next_good_one_works(engine: Engine) -> None:
    engine.publish(checksums={"proj.weight": "0" * 32})
    with pytest.raises(DigestMismatchError) as caught:
        engine.sync.pull(1)
    assert (caught.value.tensor, caught.value.version) == ("proj.weight", 1)
    engine.assert_live(0)
    publish_full(engine.root / "stream", 2, as_state(engine.states[1]))
    engine.states.append(engine.states[1])
    assert engine.sync.pull(2).commit_path == "in place"
    engine.assert_live(2)


def test_a_full_version_is_taken_live_without_a_reload(engine: Engine) -> None:
    engine.publish()
    engine.sync.pull(1)
    engine.states.append(step(engine.states[-1], 2))
    publish_full(engine.root / "stream", 2, as_state(engine.states[2]))
    report = engine.sync.pull(2)
    assert (report.commit_path, report.verified) == ("in place", "unverified-source")
    assert engine.sync.durable_version == 2
    engine.assert_live(2)
    assert engine.sync.pull(engine.publish()).commit_path == "in place"
    engine.assert_live(3)


def test_an_opaque_tensor_makes_the_commit_a_reload(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ModelConfig(quantised=True))
    report = engine.sync.pull(engine.publish())
    assert report.commit_path == "reload"
    assert "layers.0.quantised.weight" in report.reason
    assert report.bytes_by_class["opaque"] > 0
    assert engine.reloads == 1
    engine.assert_live(1)
    engine.sync.close()


def test_a_restarted_engine_attaches_to_what_is_live_and_catches_up(engine: Engine) -> None:
    for _ in range(3):
        engine.publish()
    engine.sync.pull(2)
    engine.sync.flush(60)
    engine.sync.close()
    engine.start(version=2)
    assert engine.sync.version == 2
    assert engine.sync.pull(3).chain == (3,)
    engine.assert_live(3)


def test_a_restart_at_the_base_with_the_mirror_ahead(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.pull(2)
    engine.sync.flush(60)
    engine.sync.close()
    engine.start(version=0)
    assert engine.sync.version == 0
    report = engine.sync.pull(2)
    assert (report.chain, report.commit_path) == ((1, 2), "in place")
    engine.assert_live(2)


def test_unknown_live_weights_are_brought_back_by_a_reload(engine: Engine) -> None:
    engine.publish()
    engine.sync.close()
    with torch.no_grad():
        engine.model.proj.weight.add_(1)
    engine.attach()
    assert engine.sync.version is None
    assert not engine.sync.ready
    assert engine.sync.pull(1).commit_path == "reload"
    engine.assert_live(1)
    assert engine.sync.ready


def test_a_param_that_was_permuted_after_the_load_is_never_patched(engine: Engine) -> None:
    engine.publish()
    engine.sync.close()
    with torch.no_grad():
        engine.model.proj.weight.copy_(engine.model.proj.weight.flip(0).clone())
    engine.attach()
    assert engine.sync.version == 0
    report = engine.sync.prepare(1).report
    assert report.commit_path == "reload"
    assert "`proj.weight`" in report.reason
    assert report.bytes_by_class["opaque"] > 0


def test_a_trainer_that_starts_again_resets_the_files_and_leaves_live_unknown(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.pull(2)
    prepared = engine.sync.prepare(0)
    assert (prepared.report.commit_path, engine.sync.version, engine.sync.durable_version) == ("reload", None, 0)
    assert_same(engine.model, fresh_load(CONFIG, Ranks(), engine.states[2]))
    report = engine.sync.pull(1)
    assert (report.commit_path, report.version) == ("reload", 1)
    engine.assert_live(1)
    assert engine.sync.pull(2).commit_path == "in place"
    engine.assert_live(2)


def test_a_reset_where_the_base_is_live_changes_nothing(engine: Engine) -> None:
    assert engine.sync.pull(0).commit_path == "nothing"
    engine.assert_live(0)
    engine.publish()
    assert engine.sync.pull(1).commit_path == "in place"
    engine.assert_live(1)


def test_a_reset_is_committed_by_a_reload_of_the_base(engine: Engine) -> None:
    engine.publish()
    engine.sync.pull(1)
    assert engine.sync.pull(0).commit_path == "reload"
    engine.assert_live(0)


def test_an_engine_restarted_at_n_whose_files_were_reset(engine: Engine) -> None:
    engine.publish()
    engine.sync.pull(1)
    engine.sync.prepare(0)
    engine.sync.close()
    engine.start(version=1)
    assert engine.sync.version is None
    assert engine.sync.pull(1).commit_path == "reload"
    engine.assert_live(1)


def test_two_engines_share_a_directory_and_one_lags(engine: Engine, tmp_path: Path) -> None:
    other = Engine.__new__(Engine)
    other.config, other.root, other.states = CONFIG, engine.root, engine.states
    other.start()
    for encoding in ("xor", "overwrite", "xor"):
        engine.publish(encoding=encoding)
    engine.sync.pull(1)
    engine.sync.pull(3)
    engine.sync.flush(60)
    assert other.sync.version == 0
    report = other.sync.pull(2)
    assert (report.commit_path, report.chain) == ("in place", (1, 2))
    other.assert_live(2)
    assert other.sync.pull(3).commit_path == "in place"
    other.assert_live(3)
    engine.assert_live(3)
    other.sync.close()


def test_what_is_prepared_keeps_the_files_at_what_is_live(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.pull(1)
    prepared = engine.sync.prepare(2)
    time.sleep(0.3)
    state = read_state(engine.root / "local")
    assert bytes(state["proj.weight"].data) == bytes(as_state(engine.states[1])["proj.weight"].data)
    engine.sync.commit(prepared)
    engine.sync.flush(60)
    state = read_state(engine.root / "local")
    assert bytes(state["proj.weight"].data) == bytes(as_state(engine.states[2])["proj.weight"].data)


def test_a_flipped_live_bit_is_repaired_and_reported(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.pull(1)
    with torch.no_grad():
        engine.model.proj.weight.view(torch.int16)[1, 1] ^= 32
    damaged = bytes(engine.model.proj.weight.detach().view(torch.uint8).numpy())
    prepared = engine.sync.prepare(2)
    assert prepared.report.repaired == ("proj.weight",)
    assert bytes(engine.model.proj.weight.detach().view(torch.uint8).numpy()) == damaged
    engine.sync.commit(prepared)
    engine.assert_live(2)


def test_what_is_prepared_expires(engine: Engine) -> None:
    engine.publish()
    engine.sync.close()
    engine.start(expires_after=0.2)
    prepared = engine.sync.prepare(1)
    deadline = time.monotonic() + 20
    while engine.sync.prepared is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(RefusedError):
        engine.sync.commit(prepared)
    engine.assert_live(0)
    engine.sync.pull(1)
    engine.assert_live(1)


def test_an_update_that_came_from_elsewhere_makes_live_unknown(engine: Engine) -> None:
    engine.publish()
    prepared = engine.sync.prepare(1)
    engine.sync.invalidate("the engine has loaded other weights")
    assert (engine.sync.version, engine.sync.prepared, engine.sync.ready) == (None, None, False)
    with pytest.raises(RefusedError):
        engine.sync.commit(prepared)
    assert engine.sync.pull(1).commit_path == "reload"
    engine.assert_live(1)


def test_params_that_were_released_are_refused(engine: Engine) -> None:
    engine.publish()
    data = engine.model.proj.weight.data
    engine.model.proj.weight.data = torch.empty(0, dtype=data.dtype)
    with pytest.raises(RefusedError, match=r"proj\.weight"):
        engine.sync.prepare(1)
    engine.model.proj.weight.data = data
    engine.sync.pull(1)
    engine.assert_live(1)


def test_a_reader_beside_prepare_never_sees_a_changed_byte(engine: Engine) -> None:
    for encoding in ("xor", "overwrite", "xor", "overwrite"):
        engine.publish(encoding=encoding)
    before = {name: bytes(tensor_bytes(tensor)) for name, tensor in engine.model.named_parameters()}
    stop, seen = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            now = {name: bytes(tensor_bytes(tensor)) for name, tensor in engine.model.named_parameters()}
            seen.append(now == before)

    reader = threading.Thread(target=read)
    reader.start()
    prepared = engine.sync.prepare(4)
    stop.set()
    reader.join()
    assert len(seen) > 3
    assert all(seen)
    engine.sync.commit(prepared)
    engine.assert_live(4)


def test_the_helper_that_decodes_may_die(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.close()
    engine.start(in_process=False)
    engine.sync.pull(1)
    helper = engine.sync._rank.host._decoder
    os.kill(helper.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while helper.pid is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    engine.sync.pull(2)
    engine.assert_live(2)


def test_what_prepare_does_beside_serving_is_out_of_the_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding and folding are other processes', at a lower priority; the rest keeps to the caller's thread."""
    engine.sync.close()
    engine.start(in_process=False)
    engine.publish()
    prepare = RankStore.prepare
    started: list[threading.Thread] = []

    def watched(*arguments: object, **options: object) -> PreparedUpdate:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", started.append)
            return prepare(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RankStore, "prepare", watched)
    engine.sync.commit(engine.sync.prepare(1))
    assert started == []
    engine.sync.flush()
    host = engine.sync._rank.host
    for helper in (host._decoder.pid, host.mirror._folds.helper_pid):
        assert os.getpriority(os.PRIO_PROCESS, helper) > os.getpriority(os.PRIO_PROCESS, 0)


def test_it_is_closed_at_the_end_of_a_with(engine: Engine) -> None:
    engine.publish()
    with engine.sync as sync:
        sync.pull(1)
    with pytest.raises(RefusedError, match="closed"):
        sync.pull(1)


def test_what_is_prepared_is_printed_without_its_bytes(engine: Engine) -> None:
    prepared = engine.sync.prepare(engine.publish())
    assert "version=1" in repr(prepared)
    assert "memmap" not in repr(prepared)


def test_errors_of_the_helper_are_those_of_the_work(engine: Engine) -> None:
    engine.publish(payloads={"proj.weight": b"not a frame"})
    engine.sync.close()
    engine.start(in_process=False)
    with pytest.raises(PayloadError) as caught:
        engine.sync.pull(1)
    assert (caught.value.tensor, caught.value.version) == ("proj.weight", 1)
    engine.assert_live(0)


def test_the_report_tells_what_was_done(engine: Engine) -> None:
    engine.publish()
    told = []
    engine.sync.close()
    engine.start(progress=lambda done, total: told.append((done, total)))
    report = engine.sync.pull(1)
    changed = sum(tensor.nbytes for tensor in engine.states[1].values() if tensor.numel())
    assert told[-1] == (told[-1][1], told[-1][1])
    assert 0 < told[-1][1] <= changed
    assert set(STAGES) <= set(report.seconds)
    assert min(report.wire_bytes, report.compact_bytes, report.touched_bytes, report.peak_staging_bytes) > 0
    assert json.loads(json.dumps(report.as_dict()))["commit_path"] == "in place"
    assert report.verified == "checksums"
    assert f"gpusync_last_wire_bytes {report.wire_bytes}\n" in report.prometheus_text()
    assert 'gpusync_last_seconds{stage="commit"}' in report.prometheus_text()


def test_a_target_behind_is_refused(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.pull(2)
    with pytest.raises(ChainError):
        engine.sync.pull(1)
    engine.assert_live(2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_prepare_leaves_the_collector_and_the_interpreter_to_those_who_serve(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    before = gc.get_threshold(), sys.getswitchinterval()
    during: list[tuple[tuple[int, int, int], float]] = []
    prepare = RankStore.prepare

    def watched(*arguments: object, **options: object) -> PreparedUpdate:
        during.append((gc.get_threshold(), sys.getswitchinterval()))
        if fails:
            raise MemoryError
        return prepare(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RankStore, "prepare", watched)
    with pytest.raises(MemoryError) if fails else nullcontext():
        engine.sync.prepare(engine.publish())
    [(thresholds, interval)] = during
    assert thresholds[0] > before[0][0]
    assert interval < before[1]
    deadline = time.monotonic() + 20  # the mirror's thread looks for work at the same time
    while (gc.get_threshold(), sys.getswitchinterval()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (gc.get_threshold(), sys.getswitchinterval()) == before


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_the_pause(engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    collecting: list[bool] = []
    commit = RankStore.commit

    def watched(store: RankStore, prepared: PreparedUpdate) -> None:
        collecting.append(gc.isenabled())
        commit(store, prepared)
        if fails:
            raise MemoryError

    monkeypatch.setattr(RankStore, "commit", watched)
    prepared = engine.sync.prepare(engine.publish())
    with pytest.raises(MemoryError) if fails else nullcontext():
        engine.sync.commit(prepared)
    assert collecting == [False]
    assert gc.isenabled()


def test_an_exception_in_the_commit_is_rolled_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.publish()
    prepared = engine.sync.prepare(1)
    real = engine.sync._rank.live.store.verify
    monkeypatch.setattr(engine.sync._rank.live.store, "verify", lambda update: real(update) or "proj.weight")
    with pytest.raises(DigestMismatchError):
        engine.sync.commit(prepared)
    engine.assert_live(0)
    monkeypatch.undo()
    engine.sync.pull(1)
    engine.assert_live(1)
