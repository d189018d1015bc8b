"""What must not happen to a rank that follows a stream, found by trying."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpusync.errors import ChainError, DigestMismatchError, LayoutError, MirrorError, RefusedError
from gpusync.mirror.lock import local_lock
from gpusync.mirror.session import lowest_held
from gpusync.sync.live import LiveModel
from support.engines import as_state, step
from support.models import ModelConfig, make_state
from support.slime import encode, publish_full, version_dir
from support.solo import CONFIG, Engine

UNHELD = "mtp.layers.0.weight"  # of the checkpoint; no rank holds it


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.sync.close()


def durable(engine: Engine) -> int | None:
    return engine.sync.durable_version


def test_a_wrong_tensor_that_no_rank_holds_is_refused_too(engine: Engine) -> None:
    engine.publish()
    engine.sync.pull(1)
    engine.sync.flush(20)
    old = as_state(engine.states[1])[UNHELD].data
    wrong = old.copy()
    wrong[3] ^= 1
    engine.publish(payloads={UNHELD: encode(old, wrong, "xor")})
    with pytest.raises(DigestMismatchError) as caught:
        engine.sync.prepare(2)
    assert (caught.value.tensor, durable(engine)) == (UNHELD, 1)
    engine.assert_live(1)


def test_a_reload_is_verified_before_it_is_promised(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ModelConfig(quantised=True))
    engine.publish()
    engine.sync.pull(1)
    engine.publish(checksums={"layers.0.quantised.weight": "0" * 32})
    with pytest.raises((DigestMismatchError, MirrorError)):
        engine.sync.prepare(2)
    engine.assert_live(1)
    assert durable(engine) == 1
    engine.sync.close()


def test_a_lock_that_cannot_be_had_leaves_nothing_held(engine: Engine) -> None:
    other = Engine.__new__(Engine)
    other.config, other.root, other.states = CONFIG, engine.root, engine.states
    other.start(timeout=1.0)
    engine.publish()
    engine.sync.prepare(1)  # held, so that it is not folded
    with local_lock(engine.root / "local/.weight_sync", timeout_s=5), pytest.raises(MirrorError):
        other.sync.prepare(1)
    assert other.sync._rank.host.mirror._session._held == []
    engine.sync.abort()
    other.sync.pull(1)
    other.sync.flush(20)
    other.assert_live(1)
    other.sync.close()


def test_an_attach_that_fails_holds_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.sync.close()

    def fails(_: LiveModel) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(LiveModel, "identify", fails)
        with pytest.raises(OSError, match="no such luck"):
            engine.attach()
    assert lowest_held(engine.root / "local/.weight_sync") is None
    engine.attach()


@pytest.mark.parametrize("target", [3, 4])
def test_a_pruned_stream_does_not_matter_to_a_host_that_has_it_all(engine: Engine, target: int) -> None:
    for _ in range(4):
        engine.publish()
    engine.sync.pull(3)
    engine.sync.flush(20)
    if target == 4:
        engine.sync.pull(4)
        engine.sync.flush(20)
    engine.sync.close()
    for version in (1, 2):
        shutil.rmtree(version_dir(engine.root / "stream", version))
    engine.start(version=0)
    report = engine.sync.pull(target)
    assert report.commit_path == "reload"
    assert "live weights cannot follow" in report.reason
    engine.assert_live(target)


def test_a_version_that_vanishes_after_it_was_accepted_can_be_taken(engine: Engine) -> None:
    engine.publish()
    engine.sync.prepare(1)
    engine.sync.abort()
    shutil.rmtree(version_dir(engine.root / "stream", 1))
    engine.sync.pull(1)
    engine.assert_live(1)


def test_live_weights_that_change_between_prepare_and_commit_are_not_trusted_afterwards(engine: Engine) -> None:
    for _ in range(3):
        engine.publish()
    engine.sync.pull(1)
    engine.sync.flush(20)
    prepared = engine.sync.prepare(2)
    with torch.no_grad():
        engine.model.proj.weight.view(-1)[3] += 5
    with pytest.raises(DigestMismatchError):
        engine.sync.commit(prepared)
    assert (engine.sync.version, engine.sync.ready) == (None, False)
    assert engine.sync.pull(3).commit_path == "reload"
    engine.assert_live(3)


def test_a_reload_cannot_go_where_the_files_have_passed(engine: Engine) -> None:
    engine.publish()
    engine.states.append(step(engine.states[-1], 2))
    publish_full(engine.root / "stream", 2, as_state(engine.states[2]))
    for _ in range(2):
        engine.publish()
    engine.sync.pull(4)
    engine.sync.flush(20)
    engine.sync.close()
    engine.start(version=0)
    with pytest.raises(ChainError) as caught:
        engine.sync.prepare(3)
    assert caught.value.version == 3
    engine.assert_live(0)
    engine.sync.pull(4)
    engine.assert_live(4)


def test_a_full_version_of_another_model_is_refused_whatever_is_live(engine: Engine) -> None:
    engine.publish()
    engine.sync.pull(1)
    other = {f"x.{name}": tensor for name, tensor in as_state(make_state(CONFIG)).items()}
    publish_full(engine.root / "stream", 2, other)
    engine.sync.invalidate("loaded from elsewhere")
    with pytest.raises(LayoutError):
        engine.sync.pull(2)
    assert durable(engine) == 1
    engine.sync.pull(1)
    engine.assert_live(1)


def test_failed_prepares_leave_no_file_open(engine: Engine) -> None:
    def opened() -> int:
        gc.collect()  # tracebacks of failed prepares hold some until then
        links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return sum(os.readlink(link).startswith(str(engine.root)) for link in links)

    engine.publish()
    engine.sync.pull(1)
    engine.publish(checksums={"proj.weight": "0" * 32})
    for number in range(6):
        with pytest.raises(DigestMismatchError):
            engine.sync.pull(2)
        if number == 1:
            before = opened()
    assert opened() == before


@pytest.mark.parametrize("call", ["prepare", "pull", "flush"])
def test_a_closed_one_does_nothing(tmp_path: Path, call: str) -> None:
    engine = Engine(tmp_path)
    engine.publish()
    engine.sync.pull(1)
    engine.sync.close()
    with pytest.raises(RefusedError, match="closed"):
        getattr(engine.sync, call)(0)
    engine.sync.close()


@pytest.mark.parametrize("target", ["1", None, 1.0, [1], True, False, -1, 10**20])
def test_what_is_no_version_number_is_refused(engine: Engine, target: object) -> None:
    with pytest.raises(RefusedError):
        engine.sync.prepare(target)
    with pytest.raises(RefusedError):
        engine.sync.commit(None)
    engine.assert_live(0)


def test_two_threads_take_turns_with_whole_pulls(engine: Engine) -> None:
    for _ in range(4):
        engine.publish()
    raised = []

    def pull(version: int) -> None:
        try:
            engine.sync.pull(version)
        except ChainError:
            raised.append(version)  # it came after a later one

    threads = [threading.Thread(target=pull, args=(version,)) for version in (1, 2, 3, 4, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(raised) <= {1, 2, 3}
    engine.assert_live(4)


def test_a_fold_that_cannot_be_made_is_told_by_flush(engine: Engine) -> None:
    engine.publish()
    engine.sync.prepare(1)
    entry = next((engine.root / "local/.weight_sync/inbox").glob("*/weight_v000001"))
    for shard in entry.glob("*.safetensors"):
        raw = bytearray(shard.read_bytes())
        raw[-3] ^= 1
        shard.write_bytes(raw)
    with pytest.raises(MirrorError):
        engine.sync.flush(20)
