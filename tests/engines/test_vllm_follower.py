"""A rank's weights and their stream, with a plain module in place of an engine's model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpusync.engines.module import make_loader
from gpusync.engines.vllm.follower import RESET, Follower
from gpusync.engines.vllm.settings import Settings
from gpusync.errors import DigestMismatchError, GpusyncError, RefusedError
from gpusync.layout import named_tensors, trace
from gpusync.stream import read_checkpoint
from support.checkpoints import State, Tensor, write_checkpoint
from support.slime import publish_delta

NAMES = ("0.weight", "0.bias", "1.weight")
SHAPES = ((8, 16), (8,), (4, 8))


def _state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        name: Tensor("F32", shape, rng.normal(size=shape).astype("<f4").reshape(-1).view(np.uint8))
        for name, shape in zip(NAMES, SHAPES, strict=True)
    }


class Scene:
    """A module that was loaded from the base, and a follower of it."""

    def __init__(self, root: Path) -> None:
        self.source, self.local = root / "stream", root / "local"
        self.source.mkdir()
        self.states = [_state(seed) for seed in range(4)]
        base = write_checkpoint(root / "base", self.states[0], files={"config.json": "{}"})
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4, bias=False))
        tensors = read_checkpoint(base).tensors
        load = make_loader(self.model, tensors)
        self.set(0)
        layout = trace(self.model, load, tensors)
        self.reloads: list[Path] = []
        self.omission: str | None = None
        self.follower = Follower(
            self.model,
            layout,
            base_dir=base,
            group=None,
            settings=Settings(visibility_timeout_s=0),
            reload=self._reload,
            find_omission=lambda _: self.omission,
        )

    def set(self, version: int) -> None:
        with torch.no_grad():
            for name, tensor in named_tensors(self.model).items():
                tensor.copy_(self._expected(version)[name])

    def publish(self, version: int, **options: object) -> None:
        old, new = self.states[version - 1], self.states[version]
        publish_delta(self.source, version, old, new, **options)  # type: ignore[arg-type]

    def prepare(self, version: int) -> str:
        return self.follower.prepare(version, source_dir=self.source, local_checkpoint_dir=self.local)

    def update(self, version: int) -> str:
        self.prepare(version)
        return self.follower.commit(version).commit_path

    def assert_live(self, version: int) -> None:
        assert self.follower.status["live"] == version
        for name, tensor in named_tensors(self.model).items():
            assert torch.equal(tensor, self._expected(version)[name]), name

    def close(self) -> None:
        self.follower._close()

    def _reload(self, directory: Path) -> None:
        self.reloads.append(directory)
        self.set(next(v for v in (3, 2, 1, 0) if _same(directory, self.states[v])))

    def _expected(self, version: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(each.data.view("<f4").reshape(each.shape).copy())
            for name, each in self.states[version].items()
        }


def _same(directory: Path, state: State) -> bool:
    held = b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors")))
    return all(each.data.tobytes() in held for each in state.values())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_versions_are_prepared_and_committed_in_place(scene: Scene) -> None:
    assert scene.follower.status["unknown_because"] == "nothing was pulled yet"
    for version in (1, 2):
        scene.publish(version)
        assert "in place" in scene.prepare(version)
        status = scene.follower.status
        assert (status["live"], status["prepared"], status["durable"]) == (version - 1, version, version)
        assert scene.follower.commit(version).commit_path == "in place"
        scene.assert_live(version)
    scene.close()


def test_only_what_is_prepared_is_committed(scene: Scene) -> None:
    with pytest.raises(RefusedError, match="not what is prepared"):
        scene.follower.commit(1)
    scene.publish(1)
    scene.prepare(1)
    with pytest.raises(RefusedError, match="not what is prepared"):
        scene.follower.commit(2)
    assert "no longer" in scene.follower.abort(1)
    with pytest.raises(RefusedError):
        scene.follower.commit(1)
    scene.assert_live(0)
    scene.close()


def test_a_corrupt_version_changes_nothing(scene: Scene) -> None:
    scene.publish(1)
    scene.update(1)
    scene.publish(2, checksums={"0.bias": "0" * 32})
    with pytest.raises(DigestMismatchError):
        scene.prepare(2)
    scene.assert_live(1)
    assert scene.follower.status["prepared"] is None
    scene.close()


def test_known_weights_that_something_else_has_loaded_are_found_out(scene: Scene) -> None:
    scene.publish(1)
    scene.publish(2)
    scene.update(1)
    scene.set(0)
    scene.follower.forget("/update_weights was called")
    assert scene.follower.status["live"] is None
    assert scene.follower.status["unknown_because"] == "/update_weights was called"
    scene.update(2)
    scene.assert_live(2)
    scene.close()


def test_unknown_weights_are_replaced_by_a_reload(scene: Scene) -> None:
    scene.publish(1)
    scene.publish(2)
    scene.update(1)
    scene.set(3)
    scene.follower.forget("/update_weights was called")
    assert scene.update(2) == "reload"
    assert scene.reloads == [scene.local]
    scene.assert_live(2)
    scene.close()


def test_a_new_run_begins_with_the_base(scene: Scene, tmp_path: Path) -> None:
    scene.publish(1)
    scene.update(1)
    scene.prepare(0)
    assert scene.follower.status["live"] is None
    assert scene.follower.status["unknown_because"] == RESET
    scene.source = tmp_path / "again"
    scene.publish(1)
    scene.update(1)
    scene.assert_live(1)
    scene.close()


def test_a_reload_that_leaves_something_out_puts_the_engine_in_doubt_for_good(scene: Scene) -> None:
    scene.publish(1)
    scene.publish(2)
    scene.update(1)
    scene.set(3)
    scene.follower.forget("/update_weights was called")
    scene.omission = "experts are not packed"
    scene.prepare(2)
    with pytest.raises(GpusyncError, match="experts are not packed"):
        scene.follower.commit(2)
    assert scene.follower.status["live"] is None
    assert scene.follower.status["in_doubt"] == "experts are not packed"
    with pytest.raises(RefusedError, match="experts are not packed"):
        scene.prepare(2)
    assert scene.follower.status["in_doubt"] == "experts are not packed"
    scene.close()
