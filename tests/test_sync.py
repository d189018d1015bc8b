"""Weight synchronisation of a model that serves, alone: attach, prepare, commit, and what it falls back to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpusync.errors import ChainError, DigestMismatchError, RefusedError
from gpusync.sync import WeightSync
from support.checkpoints import read_state, write_checkpoint
from support.engines import as_state, as_tensors, derived, step
from support.models import ModelConfig, TinyModel, fresh_load, make_state
from support.models_apply import assert_same
from support.models_layers import Ranks
from support.slime import publish_delta, publish_full

CONFIG = ModelConfig()


class Engine:
    """A model that serves version 0, and a stream beside it."""

    def __init__(self, root: Path, config: ModelConfig = CONFIG) -> None:
        self.config, self.root = config, root
        self.states = [make_state(config)]
        write_checkpoint(root / "base", as_state(self.states[0]))
        (root / "stream").mkdir()
        self.start()

    def start(self, version: int = 0) -> None:
        self.model = fresh_load(self.config, Ranks(), self.states[version])
        twin = TinyModel(self.config, Ranks())
        self.sync = WeightSync(
            self.model,
            load_weights=twin.load_weights,
            twin=twin,
            reload=self.reload,
            base_dir=self.root / "base",
            local_checkpoint_dir=self.root / "local",
            source_dir=self.root / "stream",
            derived=derived(),
            timeout=60,
            workers=2,
        )

    def reload(self, directory: Path) -> None:
        self.reloads = getattr(self, "reloads", 0) + 1
        with torch.no_grad():
            self.model.load_weights(as_tensors(read_state(directory), self.states[0]).items())
            self.model.post_load()

    def publish(self, *, encoding: str = "xor", **options: object) -> int:
        self.states.append(step(self.states[-1], len(self.states)))
        version = len(self.states) - 1
        old, new = as_state(self.states[-2]), as_state(self.states[-1])
        publish_delta(self.root / "stream", version, old, new, encoding=encoding, **options)  # type: ignore[arg-type]
        return version

    def assert_live(self, version: int) -> None:
        assert_same(self.model, fresh_load(self.config, Ranks(), self.states[version]))
        assert self.sync.version == version


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
    engine.start(version=0)
    engine.sync.close()
    with torch.no_grad():
        engine.model.proj.weight.add_(1)
    twin = TinyModel(CONFIG, Ranks())
    engine.sync = WeightSync(
        engine.model, load_weights=twin.load_weights, twin=twin, reload=engine.reload, base_dir=engine.root / "base",
        local_checkpoint_dir=engine.root / "local", source_dir=engine.root / "stream", derived=derived(), timeout=60,
    )  # fmt: skip
    assert engine.sync.version is None
    assert engine.sync.pull(1).commit_path == "reload"
    engine.assert_live(1)


def test_a_target_behind_is_refused(engine: Engine) -> None:
    for _ in range(2):
        engine.publish()
    engine.sync.pull(2)
    with pytest.raises(ChainError):
        engine.sync.pull(1)
    engine.assert_live(2)


def test_an_exception_in_the_commit_is_rolled_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.publish()
    prepared = engine.sync.prepare(1)
    real = engine.sync._live.store.verify
    monkeypatch.setattr(engine.sync._live.store, "verify", lambda update: real(update) or "proj.weight")
    with pytest.raises(DigestMismatchError):
        engine.sync.commit(prepared)
    engine.assert_live(0)
    monkeypatch.undo()
    engine.sync.pull(1)
    engine.assert_live(1)
