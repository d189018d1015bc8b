"""`gpusync serve` over two workers and a real stream, called as slime's trainer calls an engine."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import gpusync
from gpusync.endpoint.errors import EndpointError, UnreachableError
from gpusync.errors import GpusyncError, MirrorError
from support.agent import Agent, agent, expected_digests
from support.checkpoints import changed, small_state, write_checkpoint


class Trainer:
    """A base checkpoint and a stream beside it; `states` are what was published, by version."""

    def __init__(self, root: Path) -> None:
        self.root, self.states = root, [small_state()]
        write_checkpoint(root / "base", self.states[0])
        self.publisher = gpusync.Publisher(root / "stream", base_dir=root / "base", encoding="xor")

    @property
    def places(self) -> dict[str, str]:
        return {"source_dir": str(self.root / "stream"), "local_checkpoint_dir": str(self.root / "local")}

    @property
    def options(self) -> list[str]:
        return [
            "--source-dir",
            self.places["source_dir"],
            "--local-checkpoint-dir",
            self.places["local_checkpoint_dir"],
        ]

    def publish(self) -> int:
        self.states.append(changed(self.states[-1], len(self.states)))
        directory = write_checkpoint(self.root / "trained", self.states[-1])
        report = self.publisher.publish(directory)
        assert report.version == len(self.states) - 1
        return report.version

    def assert_live(self, running: Agent, version: int) -> None:
        assert running.client.version().live == version
        assert running.digests() == expected_digests(self.states[version], 2)


def ended(call: Callable[..., object]) -> Callable[..., None]:
    """`call`, whose server is killed meanwhile."""

    def work(*arguments: object, **more: object) -> None:
        with contextlib.suppress(UnreachableError):
            call(*arguments, **more)

    return work


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_three_versions_in_slimes_order_of_calls_and_then_the_end(trainer: Trainer) -> None:
    roots = ["--source-root", str(trainer.root), "--local-root", str(trainer.root)]
    with agent(trainer.root, *roots) as running:
        running.client.pull(0, **trainer.places)
        trainer.assert_live(running, 0)
        for _ in range(3):
            version = trainer.publish()
            answer = running.client.pull(version, **trainer.places)
            assert (answer.live, answer.durable, answer.prepared) == (version - 1, version, version)
            assert answer.commit_path == "in place"
            trainer.assert_live(running, version - 1)
            assert not running.client.is_ready(version)
            told = running.reload(trainer.root / "local", version)
            assert (told["live"], told["report"]["commit_path"]) == (version, "in place")
            trainer.assert_live(running, version)
            assert running.client.is_ready(version)
        assert 'gpusync_last_seconds{stage="commit"}' in running.client.metrics()
        workers = running.workers
        assert len(workers) == 2
        assert running.end(signal.SIGTERM) == 0
        assert not any(worker.is_running() for worker in workers)


def test_killed_in_the_middle_it_starts_again_from_the_mirror_without_the_stream(trainer: Trainer) -> None:
    with agent(trainer.root, *trainer.options) as running:
        running.client.pull(trainer.publish(), commit=True)
        version = trainer.publish()
        pulling = threading.Thread(target=ended(running.client.pull), args=(version,), kwargs={"commit": True})
        pulling.start()
        time.sleep(0.1)
        orphans = running.workers
        running.end(signal.SIGKILL)
        pulling.join(20)
        _, alive = psutil.wait_procs(orphans, timeout=20)
        assert alive == []
    (trainer.root / "stream").rename(trainer.root / "gone")
    with agent(trainer.root, *trainer.options) as running:
        live = running.client.version().live
        assert live in (version - 1, version)
        assert running.client.is_ready(live)
        trainer.assert_live(running, live)
        (trainer.root / "gone").rename(trainer.root / "stream")
        running.client.pull(trainer.publish(), commit=True)
        trainer.assert_live(running, version + 1)


def test_a_dead_worker_is_named_and_the_next_pull_starts_its_successors(trainer: Trainer) -> None:
    with agent(trainer.root, *trainer.options) as running:
        running.client.pull(trainer.publish(), commit=True)
        running.workers[1].kill()
        deadline = time.monotonic() + 20
        while running.client.is_ready() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "worker 1 is gone" in str(running.client.version().in_doubt)
        version = trainer.publish()
        began = time.monotonic()
        with pytest.raises(EndpointError, match=r"worker 1 died .*SIGKILL"):
            running.client.pull(version)
        assert time.monotonic() - began < 30
        assert not running.client.is_ready()
        assert "worker 1 died" in str(running.client.version().in_doubt)
        running.client.pull(version, commit=True)
        trainer.assert_live(running, version)


def test_what_is_refused_changes_nothing_and_what_is_late_is_waited_for(trainer: Trainer) -> None:
    occupied = trainer.root / "locals" / "occupied"
    occupied.mkdir(parents=True)
    (occupied / "diary.txt").write_text("dear diary")
    with agent(trainer.root, *trainer.options, "--local-root", str(occupied.parent)) as running:
        publishing = threading.Timer(1.0, trainer.publish)
        publishing.start()
        assert running.client.pull(1, commit=True).live == 1
        publishing.join()

        elsewhere, inside = trainer.root / "elsewhere", trainer.root / "local" / "sub"
        for wrong in (
            {"local_checkpoint_dir": str(elsewhere)},
            {"local_checkpoint_dir": str(inside)},
            {"source_dir": "/etc"},
        ):
            with pytest.raises(EndpointError, match="is not allowed"):
                running.client.pull(1, **wrong)
        with pytest.raises(EndpointError, match="is not allowed"):
            running.reload(trainer.root / "base", 1)
        assert not (trainer.root / "elsewhere").exists()

        with pytest.raises(MirrorError, match="occupied"):
            running.client.pull(1, local_checkpoint_dir=str(occupied))
        assert [path.name for path in occupied.iterdir() if path.name != ".weight_sync"] == ["diary.txt"]
        trainer.assert_live(running, 1)

        running.client.pull(trainer.publish())
        with pytest.raises(GpusyncError, match="is another version"):
            running.reload(trainer.root / "local", 1)  # not what is prepared: the files are read, which are at 2
        trainer.assert_live(running, 2)
        assert running.reload(trainer.root / "local", 2)["message"] == "reloaded from the local checkpoint"

        version = trainer.publish()
        for shard in (trainer.root / "stream" / "weight_v000003").glob("*.safetensors"):
            raw = bytearray(shard.read_bytes())
            raw[-20] ^= 1
            shard.write_bytes(raw)
        with pytest.raises(GpusyncError) as caught:
            running.client.pull(version)
        assert caught.value.version == 3
        assert caught.value.tensor in trainer.states[0]
        trainer.assert_live(running, 2)


def test_a_trainer_filesystem_that_hangs_is_a_time_out_with_its_path(trainer: Trainer) -> None:
    options = [*trainer.options, "--timeout", "8", "--pre-read-hook", "support.hanging:hang"]
    with agent(trainer.root, *options) as running:
        trainer.publish()
        with pytest.raises(EndpointError) as caught:
            running.client.pull(1)
        assert caught.value.path == trainer.places["source_dir"]
        assert "worker 0 has not answered prepare" in str(caught.value)
