"""Power fails while versions are received, accepted and folded behind: what `accept` has returned for comes up again.

The same model as for pulls (`test_power_loss`), over the inbox as well as the files. The recovery is shown without the
stream, so that what was accepted can only come from the directory itself.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import gpusync
from gpusync.errors import GpusyncError
from gpusync.mirror import io
from support.powerloss import PowerCut, Recorder
from support.streams import Stream, check_local, tiny_tensors, write_stream

KINDS = ["xor", "overwrite", "full", "gpusync"]
CASES = 400
CASES_A_HISTORY = 10
NEWEST = 5
STEPS_OF_A_VERSION = 120
WAIT_S = 60.0


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    return {
        kind: write_stream(tmp_path_factory.mktemp(kind), kind, tiny_tensors(), count=NEWEST, share=0.05)
        for kind in KINDS
    }


@pytest.fixture
def quiet_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror's thread ends by PowerCut where its process would."""
    shown = threading.excepthook

    def show(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, PowerCut):
            shown(args)

    monkeypatch.setattr(threading, "excepthook", show)


def open_mirror(local: Path, stream: Stream, source: Path | None = None) -> gpusync.Mirror:
    return gpusync.Mirror(
        local, base_dir=stream.base, source_dir=source or stream.source, workers=1, lock_timeout=WAIT_S, keep_versions=1
    )


@dataclass
class History:
    """Versions accepted by one mirror after another. `started` and the recorder's reports are (step, version)."""

    stream: Stream
    local: Path
    recorder: Recorder
    before: int | None
    started: list[tuple[int, int]] = field(default_factory=list)

    def live(self, rng: random.Random, first: int) -> int:
        """One process: some versions from `first` on, folded at once or later. Returns where the next one goes on."""
        with suppress(PowerCut), io.observed(self.recorder), open_mirror(self.local, self.stream) as mirror:
            while first <= NEWEST and not self.recorder.stopped and rng.random() < 0.8:
                target = rng.randint(first, min(first + 1, NEWEST))
                self.started.append((len(self.recorder.log), target))
                mirror.receive(target)
                mirror.accept(target)
                self.recorder.report(target)
                first = target + 1
                if rng.random() < 0.5:
                    self.wait_for_fold(mirror)
        self.recorder.go_on()
        return first

    def wait_for_fold(self, mirror: gpusync.Mirror) -> None:
        deadline = time.monotonic() + WAIT_S
        while mirror.status().lag_versions and not self.recorder.stopped:
            assert time.monotonic() < deadline, mirror.status()
            time.sleep(0.002)

    def allowed_at(self, step: int) -> frozenset[int | None]:
        """The last version reported, or any whose making began after that."""
        reports = [(when, version) for when, version in self.recorder.reports if when <= step]
        since, base = reports[-1] if reports else (0, self.before)
        return frozenset({base}) | {version for when, version in self.started if since <= when <= step}


def record_history(rng: random.Random, stream: Stream, root: Path) -> History:
    root.mkdir()
    local = root / "local"
    before: int | None = None
    if rng.random() < 0.5:
        before = rng.randint(0, 2)
        stream.pull(local, before)()
    history = History(stream, local, Recorder(root), before)
    first = (before or 0) + 1
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            history.recorder.stop_at(rng.randint(1, 2 * STEPS_OF_A_VERSION))
        first = history.live(rng, first)
    return history


def run_case(rng: random.Random, history: History, root: Path, note: str) -> None:
    step = rng.randint(0, len(history.recorder.log))
    root.mkdir()
    history.recorder.disk_after(step).survive(root, rng)
    check_recovery(root / "local", history.stream, history.allowed_at(step), f"{note}, step {step}")
    shutil.rmtree(root)


def check_recovery(local: Path, stream: Stream, allowed: frozenset[int | None], note: str) -> None:
    nowhere = local.parent / "nothing published"
    nowhere.mkdir()
    with open_mirror(local, stream, nowhere) as mirror:
        durable = mirror.status().durable_version
        assert durable in allowed, f"{note}: {durable} came up instead of one of {allowed}"
        mirror.flush(WAIT_S)
        assert mirror.status().durable_version == durable, note
    if durable is not None:
        check_local(local, stream, durable, note)
    stream.pull(local, NEWEST)()
    check_local(local, stream, NEWEST, note)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES // CASES_A_HISTORY))
def test_an_accepted_version_survives_a_power_loss(
    streams: dict[str, Stream], no_waiting: None, quiet_cuts: None, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    history = record_history(rng, streams[kind], tmp_path / "recorded")
    for case in range(CASES_A_HISTORY):
        run_case(rng, history, tmp_path / str(case), f"{kind}, seed {seed}, case {case}")


def without_syncs(of: Callable[[Path], bool]) -> dict[str, Callable]:
    real = io.WritableFile.fsync
    return {"WritableFile.fsync": lambda file: None if of(file.path) else real(file)}


BREAKAGES: dict[str, dict[str, Callable]] = {
    "what is received is not synced": without_syncs(lambda path: path.parent.name.startswith("weight_v")),
    "the inbox is not synced": without_syncs(lambda path: path.name == "inbox.json.tmp"),
    "directories are not synced": {"fsync_directory": lambda _: None},
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_protocol_is_caught(
    streams: dict[str, Stream],
    no_waiting: None,
    quiet_cuts: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    breakage: str,
) -> None:
    for name, broken in BREAKAGES[breakage].items():
        monkeypatch.setattr(f"gpusync.mirror.io.{name}", broken)
    rng = random.Random(breakage)
    for attempt in range(30):
        history = record_history(rng, streams[rng.choice(["xor", "full"])], tmp_path / f"recorded {attempt}")
        try:
            for case in range(CASES_A_HISTORY):
                run_case(rng, history, tmp_path / f"{attempt}-{case}", breakage)
        except (AssertionError, GpusyncError, OSError, ValueError):
            return
    pytest.fail(f"nothing noticed that {breakage}")
