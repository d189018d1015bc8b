"""A trainer that starts over while the local directory is kept: never old weights under a new version number.

Random sequences of publishing, restarting, pulling and being killed. A restarted trainer publishes the same numbers,
the same tensor names and thus, without a stream_id, the very same index files; only the weights differ.
"""

from __future__ import annotations

import random
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest

from gpusync import PullReport
from gpusync.errors import ChainError, GpusyncError
from gpusync.mirror import io
from support.checkpoints import State, changed, read_state, tensor, write_checkpoint
from support.kill import Pull
from support.powerloss import PowerCut
from support.slime import publish_delta, publish_full, version_dir

SEQUENCES = 30
ACTIONS = 14
LAST = ("publish", "pull newest")


def mini_tensors() -> State:
    rng = np.random.default_rng(3)
    return {"w": tensor(rng, "BF16", 40, 50), "v": tensor(rng, "F32", 9), "codes": tensor(rng, "F8_E4M3", 101)}


class Trainer:
    """Publishes to one place, run after run. `states` are the present run's versions; 0 is the base of them all."""

    def __init__(self, root: Path, rng: random.Random, *, with_stream_id: bool, wipes: bool) -> None:
        self.rng, self.with_stream_id, self.wipes = rng, with_stream_id, wipes
        self.source = root / "stream"
        self.source.mkdir()
        self.base = write_checkpoint(root / "base", mini_tensors())
        self.states = {0: mini_tensors()}
        self.stream_id: str | None = None
        self.restart()

    @property
    def newest(self) -> int:
        return max(self.states)

    def restart(self) -> None:
        """From the base again. What the old run published goes at once (`wipes`) or is replaced number by number."""
        if self.wipes:
            shutil.rmtree(self.source)
            self.source.mkdir()
        self.states = {0: self.states[0]}
        self.stream_id = str(uuid.UUID(int=self.rng.getrandbits(128), version=4)) if self.with_stream_id else None

    def publish(self, kind: str) -> None:
        """ "delta", "nothing" (a delta in which no byte changed) or "full"."""
        version, old = self.newest + 1, self.states[self.newest]
        names = self.rng.choice([["w", "v", "codes"], ["w", "codes"], ["v"]])
        new = old if kind == "nothing" else changed(old, self.rng.getrandbits(32), share=0.1, names=names)
        shutil.rmtree(version_dir(self.source, version), ignore_errors=True)
        if kind == "full":
            publish_full(self.source, version, new)
        else:
            metadata = {} if self.stream_id is None else {"stream_id": self.stream_id}
            publish_delta(self.source, version, old, new, metadata=metadata)
        self.states[version] = new


class Receiver:
    """One local directory, and what must be true of it after every pull."""

    def __init__(self, trainer: Trainer, local: Path, rng: random.Random) -> None:
        self.trainer, self.local, self.rng = trainer, local, rng

    def pull(self, version: int, **options: object) -> PullReport:
        report = Pull(self.local, self.trainer.base, self.trainer.source, version, options)()
        assert read_state(self.local) == self.trainer.states[version]
        assert report.target_version == version
        return report

    def pull_newest(self) -> None:
        """A target that seems to lie behind is refused, where nothing shows that the numbers began anew."""
        try:
            self.pull(self.trainer.newest)
        except ChainError as refused:
            if "behind" not in str(refused):
                raise
            self.pull(self.trainer.newest, allow_rewind=True)

    def pull_some(self) -> None:
        self.pull(self.rng.choice(list(self.trainer.states)), allow_rewind=True)

    def pull_and_die(self) -> None:
        left = self.rng.randint(1, 120)

        def observer(_: io.Event) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise PowerCut

        try:
            with io.observed(observer):
                self.pull_newest()
        except PowerCut:
            pass


def play(root: Path, seed: int, *, with_stream_id: bool, wipes: bool) -> None:
    """A random sequence, the same for a seed; at its end, the newest version is pulled once more."""
    root.mkdir()
    rng = random.Random(seed)
    trainer = Trainer(root, rng, with_stream_id=with_stream_id, wipes=wipes)
    receiver = Receiver(trainer, root / "local", rng)
    actions = {
        "publish": (5, lambda: trainer.publish("delta")),
        "publish nothing": (1, lambda: trainer.publish("nothing")),
        "publish full": (1, lambda: trainer.publish("full")),
        "restart": (2, trainer.restart),
        "pull newest": (4, receiver.pull_newest),
        "pull some": (1, receiver.pull_some),
        "pull 0": (1, lambda: receiver.pull(0)),
        "pull and die": (2, receiver.pull_and_die),
    }
    done: list[str] = []
    try:
        for name in [*rng.choices(list(actions), [weight for weight, _ in actions.values()], k=ACTIONS), *LAST]:
            done.append(name)
            actions[name][1]()
    except (AssertionError, GpusyncError, OSError) as error:
        raise AssertionError(f"seed {seed}: {', '.join(done)}") from error


@pytest.mark.parametrize("wipes", [True, False], ids=["wiped", "leftovers"])
@pytest.mark.parametrize("with_stream_id", [True, False], ids=["stream id", "no stream id"])
def test_no_old_weights_under_a_new_number(no_waiting, tmp_path: Path, with_stream_id: bool, wipes: bool) -> None:
    for seed in range(SEQUENCES):
        play(tmp_path / str(seed), seed, with_stream_id=with_stream_id, wipes=wipes)
