"""Payloads in memory, one thread: xor under zstd against GS01, decoded and applied to live tensors, and encoded.

Tensors are allocated beforehand; a decoder finds its payload in memory and changes the tensor in place: xor window by
window through a buffer, GS01 as a commit does it, through a segment table over torch CPU tensors (numpy arrays without
torch). Each result is compared, bit for bit, before its time counts. Ratios are of medians of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from harness import Report, Timing, emit, measure
from synthetic import decoder_layout, make_step, make_weights

from gpusync.codec import MemoryPayload, apply_whole, choose_payload, encode_gs01, encode_xor
from gpusync_kernels import (
    HostOps,
    Payload,
    SegmentTable,
    bind_sparse,
    choose_host_ops,
    parse_blob,
    sparse_apply,
    using_host_ops,
)

Words = npt.NDArray[np.uint16]

SIZES = {"toy": 6_000_000, "600MB": 600_000_000, "1.5GB": 1_500_000_000}
# By host loops: how much faster than xor decoding and applying is to be.
LEAST = {"numpy": 1.7, "numba": 3.5}


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="1.5GB", show_default=True)
@click.option("--density", default=0.0065, show_default=True, help="Share of elements that differ.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(size: str, density: float, repeats: int, as_json: bool, as_csv: bool) -> None:
    bench = _Bench(SIZES[size], density, repeats)
    rows = [bench.xor_row()]
    notes = []
    for ops, note in _loops():
        notes += [note] if note else []
        if ops is not None:
            with using_host_ops(ops):
                rows.append(bench.gs01_row(ops.name))
    for row in rows[1:]:
        row["apply, xor's over it"] = float(rows[0]["apply s"]) / float(row["apply s"])
        row["encode, xor's over it"] = float(rows[0]["encode s"]) / float(row["encode s"])
        least = LEAST[str(row["payload"]).removeprefix("GS01, ")]
        notes.append(_judged(f"{row['payload']}: decode and apply", float(row["apply, xor's over it"]), least, size))
        notes.append(_judged(f"{row['payload']}: encode", float(row["encode, xor's over it"]), 1.0, size))
    changed = f"{bench.changed / bench.elements:.3%} of {bench.elements:,} bf16 elements changed"
    report = Report(
        title=f"decode and apply, encode; median of {repeats}",
        columns=("payload", "bytes", "apply s", "encode s", "apply, xor's over it", "encode, xor's over it"),
        rows=rows,
        notes=[changed, *notes, "every result was equal to the new state, bit for bit"],
    )
    emit([report], directory=Path.cwd(), as_json=as_json, as_csv=as_csv)


class _Bench:
    def __init__(self, nbytes: int, density: float, repeats: int) -> None:
        self._repeats = repeats
        self.old = [make_weights(shape, seed=at) for at, shape in enumerate(decoder_layout(nbytes).values())]
        self.new = [make_step(words, density, seed=at) for at, words in enumerate(self.old)]
        self.live = [_tensor(words) for words in self.old]
        self.elements = sum(words.size for words in self.old)
        self.changed = sum(int(np.count_nonzero(a != b)) for a, b in zip(self.old, self.new, strict=True))

    def xor_row(self) -> dict[str, Any]:
        def encode() -> list[bytes | None]:
            return [encode_xor(old, new) for old, new in self._pairs()]

        encoded, payloads = self._timed(encode)
        live = [_bytes(tensor) for tensor in self.live]

        def apply() -> None:
            for payload, target in zip(payloads, live, strict=True):
                if payload is not None:
                    source = MemoryPayload(payload)
                    apply_whole(source, target, encoding="xor", element_bytes=2, float_order=True)

        return self._row("xor, zstd-1", payloads, encoded, self._timed_apply(apply))

    def gs01_row(self, loops: str) -> dict[str, Any]:
        def encode() -> list[bytes | None]:
            return [choose_payload(o, n, element_bytes=2, float_order=True)[0] for o, n in self._pairs()]

        encoded, payloads = self._timed(encode)
        # a small dense tensor may have got another form, which is not what is measured
        made = [encode_gs01(old, new, element_bytes=2, float_order=True) for old, new in self._pairs()]
        kept = {at: np.frombuffer(payload, np.uint8) for at, payload in enumerate(made) if payload is not None}
        every = np.arange(len(self.live))
        table = SegmentTable.flat(dst=every, src=every, nbytes=[words.nbytes for words in self.old])
        blobs = [
            Payload(source=at, data=_tensor(data) if self._is_torch else data, blob=parse_blob(data, data.size))
            for at, data in kept.items()
        ]

        def apply() -> None:
            sparse_apply(bind_sparse(table, dst=self.live, payloads=blobs))

        return self._row(f"GS01, {loops}", payloads, encoded, self._timed_apply(apply))

    @property
    def _is_torch(self) -> bool:
        return not isinstance(self.live[0], np.ndarray)

    def _pairs(self) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        for old, new in zip(self.old, self.new, strict=True):
            yield old.view(np.uint8), new.view(np.uint8)

    def _timed(self, encode: Callable[[], list[bytes | None]]) -> tuple[Timing, list[bytes | None]]:
        made: list[list[bytes | None]] = []
        timing = measure(lambda: made.append(encode()), repeats=max(1, self._repeats // 2))
        return timing, made[-1]

    def _timed_apply(self, apply: Callable[[], None]) -> Timing:
        timing = measure(apply, repeats=self._repeats, before=self._restore)
        for tensor, new in zip(self.live, self.new, strict=True):
            if not np.array_equal(_bytes(tensor), new.view(np.uint8)):
                raise SystemExit("a tensor is not what was encoded")
        return timing

    def _restore(self) -> None:
        for tensor, old in zip(self.live, self.old, strict=True):
            _bytes(tensor)[:] = old.view(np.uint8)

    def _row(self, payload: str, payloads: list[bytes | None], encoded: Timing, applied: Timing) -> dict[str, Any]:
        nbytes = sum(len(each) for each in payloads if each is not None)
        return {"payload": payload, "bytes": nbytes, "apply s": applied.wall_s, "encode s": encoded.wall_s}


def _loops() -> Iterator[tuple[HostOps | None, str]]:
    yield choose_host_ops("numpy")[0], ""
    try:
        yield choose_host_ops("numba")[0], ""
    except ImportError as error:
        yield None, f"numba was left out: {error}"


def _tensor(data: npt.NDArray[Any]) -> Any:
    """A tensor of its own with these bytes; an array where torch is not installed."""
    try:
        import torch
    except ImportError:
        return data.copy()
    return torch.from_numpy(data.view(np.int16 if data.itemsize == 2 else np.uint8).copy())


def _bytes(tensor: Any) -> npt.NDArray[np.uint8]:
    array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
    view: npt.NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return view


def _judged(what: str, ratio: float, least: float, size: str) -> str:
    judged = "" if size == "toy" else f"; {'met' if ratio >= least else 'MISSED'}"
    return f"{what}: {ratio:.2f} times as fast as xor (target: at least {least}{judged})"


if __name__ == "__main__":
    main()
