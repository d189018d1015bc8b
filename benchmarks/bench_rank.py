"""A synthetic rank of any size brought to a version by its store: prepare, commit, verify and roll back, at several
densities, beside what was predicted for an H200.

    python benchmarks/bench_rank.py [--gb 20] [--toy]

Tensors of 64 MiB in bf16, a few of them different and the others their copies, so that the host needs little memory;
each has its own place, its own digest and its own payload on the wire to the device. Elements that change lie evenly.
The store chooses its memory by where the params are: the same code runs on a GPU and, at a size that suits it, on CPU
tensors. Every live byte is compared after each commit and each roll-back; a row whose bytes are wrong has no time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_kernels import COPY_BYTES_PER_S, choose_device
from harness import Report, machine, print_machine, print_report
from rich.console import Console

from gpusync.codec import MemoryPayload, encode_gs01, encode_xor, open_delta
from gpusync.digest import digest_of
from gpusync.errors import Where
from gpusync.layout import attach, named_tensors, trace
from gpusync.store.casts import CastStore
from gpusync.store.choose_memory import choose_memory
from gpusync.store.compact import CompactWriter, Step, StepFiles
from gpusync.store.rank import STAGING_BYTES, RankStore
from gpusync.store.tensor_update import TensorUpdate
from gpusync.stream import TensorSpec

DENSITIES = (0.001, 0.01, 0.1)
FORMS = ("xor", "gs01")
RANK_BYTES = 20_000_000_000
TOY_BYTES = 4 << 20
TENSOR_BYTES = 64 << 20
VARIANTS = 4
COLUMNS = 4096
REPETITIONS = 3
UPLOAD_BYTES_PER_S = 10e9  # assumed: one thread that copies from the page cache to pinned memory
CHAIN_S_PER_BYTE = 10.3e-3 / 2**30  # as in kernels/README.md
HEADER = ("form", "changed %", "compact MB", "what", "found", "predicted", "result")

Words = np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=RANK_BYTES / 1e9, help="GB of the rank's params")
    parser.add_argument("--toy", action="store_true", help="4 MiB, once: does it run at all")
    arguments = parser.parse_args()
    out = Console()
    print_machine(machine(Path.cwd()), out)
    nbytes = TOY_BYTES if arguments.toy else int(arguments.gb * 1e9)
    print_report(rank_report(choose_device()[0], nbytes=nbytes, toy=arguments.toy), out)


def rank_report(device: Any | None, *, nbytes: int, toy: bool) -> Report:
    """`device` None: CPU tensors."""
    tensor_bytes = nbytes // 16 if toy else min(TENSOR_BYTES, nbytes // VARIANTS)
    rank = Rank(tensors=max(VARIANTS, nbytes // tensor_bytes), tensor_bytes=tensor_bytes, device=device or "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-rank-") as temporary:
        rows = [
            row
            for form in FORMS
            for density in DENSITIES
            for row in rank.rows(Path(temporary), form, density, repetitions=1 if toy else REPETITIONS)
        ]
    applier, decoder = rank.store.memory.backend
    notes = [
        f"applier: {applier}; decoder: {decoder}",
        "predicted: for an H200, from the bytes that must move, as kernels/README.md does; prepare also with "
        f"{UPLOAD_BYTES_PER_S / 1e9:.0f} GB/s into pinned memory, and without host work",
        "peak: the most that was held beside the params",
    ]
    if device is None:
        notes.append("CPU tensors: no figure here is of a GPU")
    title = f"a rank of {rank.nbytes / 1e6:,.0f} MB in {rank.tensors} tensors"
    return Report(title=title, columns=HEADER, rows=rows, notes=notes)


class Flat(torch.nn.Module):
    """Tensors of a checkpoint as params, each whole."""

    def __init__(self, specs: Sequence[TensorSpec], device: Any) -> None:
        super().__init__()
        for spec in specs:
            empty = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
            self.register_parameter(spec.name, torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._parameters[name].data.copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A version: what each variant becomes, on the device, and the update that leads there."""

    after: list[torch.Tensor]
    updates: dict[str, TensorUpdate]
    files: StepFiles
    compact_bytes: int
    changed: int


class Rank:
    """The live params of one rank, under a store, at version 0."""

    def __init__(self, *, tensors: int, tensor_bytes: int, device: Any) -> None:
        columns = min(COLUMNS, tensor_bytes // 2)
        shape = (tensor_bytes // 2 // columns, columns)
        self.tensors, self.device = tensors, torch.device(device)
        self.tensor_bytes = 2 * shape[0] * shape[1]
        specs = {
            f"t{number:05d}": TensorSpec(name=f"t{number:05d}", dtype="BF16", shape=shape, nbytes=self.tensor_bytes)
            for number in range(tensors)
        }
        rng = np.random.default_rng(0)
        self.before = [rng.integers(0, 1 << 16, self.tensor_bytes // 2, np.uint16) for _ in range(VARIANTS)]
        model = Flat(list(specs.values()), self.device)
        self.params = named_tensors(model)
        self._on_device = [self._send(words) for words in self.before]
        for number, param in enumerate(self.params.values()):
            param.copy_(self._on_device[number % VARIANTS].view(torch.bfloat16).reshape(shape))
        layout, _ = attach(trace(model, model.load_weights, specs), self.params)
        memory, _ = choose_memory(self.params)
        memory.warm_up()
        casts = CastStore(layout, self.params, memory=memory)
        self.store = RankStore(layout, self.params, memory=memory, casts=casts)

    @property
    def nbytes(self) -> int:
        return self.tensors * self.tensor_bytes

    def rows(self, work: Path, form: str, density: float, *, repetitions: int) -> list[dict[str, object]]:
        """One for each thing that is measured; only one, without figures, where a byte was wrong."""
        row: dict[str, object] = {"form": form, "changed %": 100 * density}
        target = self._target(work / f"{form}-{density}", form, density)
        row["compact MB"] = target.compact_bytes / 1e6
        try:
            found = self._measure(target, repetitions)
        except ValueError as error:
            self._reset()
            return [row | {"result": f"WRONG: {error}"}]
        finally:
            target.files.close()
        predicted = self._predicted(target)
        return [
            row | {"what": what, "found": value, "predicted": predicted.get(what), "result": "exact"}
            for what, value in found.items()
        ]

    def _measure(self, target: Target, repetitions: int) -> dict[str, float]:
        """Medians; the first time, which compiles and warms up, is not counted."""
        store = self.store
        taken: list[dict[str, float]] = []
        for _ in range(1 + repetitions):
            store.memory.reset_peak()
            held, times = store.memory.live_bytes, {}
            times["prepare, ms"], prepared = self._timed(lambda: store.prepare(target.updates, target.files))
            self._compare(self._on_device, "prepare")
            times["commit, ms"], _ = self._timed(lambda prepared=prepared: store.commit(prepared))
            self._compare(target.after, "commit")
            times["verify after it, ms"], wrong = self._timed(lambda prepared=prepared: store.verify(prepared))
            if wrong is not None:
                raise ValueError(f"verify takes `{wrong}` for wrong")
            times["peak, MB"] = (store.memory.peak_bytes - held) / 1e6
            times["calls of a commit"] = len(prepared.operations)
            times["roll back, ms"], _ = self._timed(lambda prepared=prepared: store.roll_back(prepared))
            self._compare(self._on_device, "roll-back")
            taken.append(times)
            del prepared
        return {what: median(times[what] for times in taken[1:]) for what in taken[0]}

    def _predicted(self, target: Target) -> dict[str, float]:
        """The bytes that must move, by what a copy was seen to reach on an H200 elsewhere."""
        density = target.changed / (self.tensor_bytes // 2 * self.tensors)
        touched = self.nbytes * (1 - (1 - density) ** 16)
        compact, chain_s = target.compact_bytes, self.tensor_bytes * CHAIN_S_PER_BYTE
        apply_s = (2 * touched + compact) / COPY_BYTES_PER_S
        room = min(STAGING_BYTES // 2, self.nbytes)
        digest_s = self.nbytes * 17 / 16 / COPY_BYTES_PER_S + -(-self.nbytes // room) * chain_s
        scratch_s = 2 * self.nbytes / COPY_BYTES_PER_S
        return {
            "prepare, ms": 1e3 * (scratch_s + apply_s + 2 * digest_s + compact / UPLOAD_BYTES_PER_S),
            "commit, ms": 1e3 * apply_s,
            "verify after it, ms": 1e3 * digest_s,
            "roll back, ms": 1e3 * apply_s,
            "peak, MB": (compact + room * 17 / 16) / 1e6,
            "calls of a commit": 1,
        }

    def _target(self, path: Path, form: str, density: float) -> Target:
        after = [changed(words, density, seed) for seed, words in enumerate(self.before)]
        steps = list(self._steps(path, form, after))
        checksums = [digest_of("xxh3-128", words.view(np.uint8)) for words in after]
        updates = {
            name: TensorUpdate(
                nbytes=self.tensor_bytes,
                steps=(steps[number % VARIANTS],),
                algorithm="xxh3-128",
                checksum=checksums[number % VARIANTS],
                where=Where(tensor=name, version=1),
            )
            for number, name in enumerate(self.params)
        }
        counts = [int(np.count_nonzero(a != b)) for a, b in zip(after, self.before, strict=True)]
        return Target(
            after=[self._send(words) for words in after],
            updates=updates,
            files=StepFiles(path),
            compact_bytes=sum(update.steps[0].nbytes for update in updates.values()),
            changed=sum(counts[number % VARIANTS] for number in range(self.tensors)),
        )

    def _steps(self, path: Path, form: str, after: Sequence[Words]) -> Iterator[Step]:
        """One delta of each variant, as the leader of a host keeps it."""
        writer = CompactWriter(path)
        for old, new in zip(self.before, after, strict=True):
            stored = MemoryPayload(encoded(form, old.view(np.uint8), new.view(np.uint8)))
            decoder = open_delta(
                stored,
                encoding="gpusync" if form == "gs01" else form,
                nbytes=self.tensor_bytes,
                element_bytes=2,
                float_order=True,
            )
            yield writer.add(decoder, nbytes=self.tensor_bytes, element_bytes=2)
        writer.close()

    def _compare(self, variants: Sequence[torch.Tensor], after: str) -> None:
        """Raises ValueError for the first param that does not hold its variant."""
        for number, (name, param) in enumerate(self.params.items()):
            if not torch.equal(param.view(torch.int16).reshape(-1), variants[number % VARIANTS]):
                raise ValueError(f"`{name}` after {after}")

    def _reset(self) -> None:
        for number, param in enumerate(self.params.values()):
            param.view(torch.int16).copy_(self._on_device[number % VARIANTS].reshape(param.shape))

    def _send(self, words: Words) -> torch.Tensor:
        return torch.from_numpy(words.view(np.int16)).to(self.device)

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """(milliseconds, what it returned)"""
        self.store.memory.synchronise()
        began = time.perf_counter()
        result = work()
        self.store.memory.synchronise()
        return 1e3 * (time.perf_counter() - began), result


def changed(words: Words, density: float, seed: int) -> Words:
    """The lowest bit flipped in one element of each of as many equal parts."""
    after, count = words.copy(), max(1, int(words.size * density))
    places = (np.arange(count) + np.random.default_rng([1, seed]).random(count)) * (words.size / count)
    after[places.astype(np.int64)] ^= 1
    return after


def encoded(form: str, old: np.ndarray, new: np.ndarray) -> bytes:
    payload = encode_xor(old, new) if form == "xor" else encode_gs01(old, new, element_bytes=2, float_order=True)
    if payload is None:
        raise ValueError(f"no {form} payload for these states")
    return payload


if __name__ == "__main__":
    main()
