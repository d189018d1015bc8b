"""Frames of GF01 payloads by their size: decoded by nvCOMP beside a plain device copy, and by libzstd on one thread.

    python benchmarks/bench_frames.py [--mib 512] [--toy]

The bytes are those of a real AdamW step of a small decoder on real text, repeated to the size that is asked for: the
xor of two states, and the planes of the new one. Every result is compared before its time is told. Without a CUDA
device or nvCOMP only libzstd is measured, and it is said.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_kernels import best_time, choose_device
from harness import Report, machine, print_machine, print_report
from rich.console import Console

from gpusync.codec import FULL, MemoryPayload, encode_gf01
from gpusync.codec.frame_decoder import FrameDecoder, HostFrameDecoder, choose_frame_decoder
from gpusync.codec.gf01_layout import read_layout
from gpusync.codec.stored_frames import StoredFrame, gf01_frames
from gpusync.demo.adamw import AdamWSettings
from gpusync.demo.model import DecoderShape
from gpusync.demo.trainers import DEMO_SHAPE, DecoderTrainer

FRAME_BYTES = [1 << log2 for log2 in range(16, 21)]
TOY_SHAPE = DecoderShape(vocabulary=512, hidden=64, layers=1, heads=2, kv_heads=1, feed_forward=128)
COLUMNS = (
    "bytes", "frame KiB", "frames", "stored %", "nvCOMP GB/s", "% of copy", "with upload GB/s", "libzstd GB/s",
    "result",
)  # fmt: skip

Frames = Sequence[StoredFrame]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="MiB that are decoded for each row")
    parser.add_argument("--toy", action="store_true", help="1 MiB, once: does it run at all")
    arguments = parser.parse_args()
    out = Console()
    print_machine(machine(Path.cwd()), out)
    print_report(frames_report(choose_device()[0], mib=arguments.mib, toy=arguments.toy), out)


def frames_report(device: Any | None, *, mib: int, toy: bool) -> Report:
    """`device` None: the host's decoder only. A row whose bytes are wrong has a result that says so, and no time."""
    decoder, reason = choose_frame_decoder(device)
    nbytes, repetitions = (1 << 20, 1) if toy else (mib << 20, 5)
    copy = None if decoder.device is None else copy_bandwidth(nbytes, device, repetitions)
    rows = [
        measured(name, data, frame_bytes, nbytes, decoder, copy, repetitions)
        for name, data in delta_bytes(TOY_SHAPE if toy else DEMO_SHAPE).items()
        for frame_bytes in FRAME_BYTES
    ]
    notes = [f"decoder: {'libzstd, no CUDA device is used' if device is None else reason}"]
    notes += ["libzstd: one thread; % of copy counts bytes read and written"]
    if decoder.device is None:
        notes.append("nvCOMP was not run: no figure here is of a GPU")
    if toy:
        notes.append("toy size: times mean nothing")
    return Report(title=f"{nbytes >> 20} MiB of GF01 frames", columns=COLUMNS, rows=rows, notes=notes)


def delta_bytes(shape: DecoderShape) -> dict[str, np.ndarray]:
    """What frames hold after one optimizer step: raw bytes of GF01 payloads."""
    trainer = DecoderTrainer(seed=0, settings=AdamWSettings(), shape=shape)
    old = np.concatenate([entry.data for entry in trainer.export()])
    trainer.step()
    new = np.concatenate([entry.data for entry in trainer.export()])
    planes = np.ascontiguousarray(new.reshape(-1, 2).T).reshape(-1)
    return {"xor of one step": old ^ new, "full planes": planes}


def measured(
    name: str,
    data: np.ndarray,
    frame_bytes: int,
    nbytes: int,
    decoder: FrameDecoder,
    copy: float | None,
    repetitions: int,
) -> dict[str, object]:
    frames = list(repeated(frames_of(data, frame_bytes), data.size, frame_bytes, nbytes))
    decoded = sum(frame.nbytes for frame in frames)
    stored = sum(len(frame.stored) for frame in frames)
    row: dict[str, object] = {
        "bytes": name,
        "frame KiB": frame_bytes >> 10,
        "frames": len(frames),
        "stored %": 100 * stored / decoded,
        "result": "exact",
    }
    host = np.full(nbytes, 0xA5, np.uint8)
    row["libzstd GB/s"] = decoded / seconds_of(lambda: HostFrameDecoder().decode(frames, host), 1) / 1e9
    if not holds(host, frames, data, frame_bytes):
        return wrong(row)
    if decoder.device is None or copy is None:
        return row
    import torch

    out = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=decoder.device)

    def send_and_decode() -> None:
        decoder.decode(frames, out)
        torch.cuda.synchronize(decoder.device)

    row["with upload GB/s"] = decoded / seconds_of(send_and_decode, repetitions) / 1e9
    if not holds(out.cpu().numpy(), frames, data, frame_bytes):
        return wrong(row)
    out.fill_(0xA5)
    seconds = seconds_of(already_there(frames, decoder, out), repetitions)
    if not holds(out.cpu().numpy(), frames, data, frame_bytes):
        return wrong(row)
    row["nvCOMP GB/s"] = decoded / seconds / 1e9
    row["% of copy"] = 100 * (decoded + stored) / seconds / copy
    return row


def already_there(frames: Frames, decoder: Any, out: Any) -> Callable[[], None]:
    """Decodes frames whose stored bytes are on the device, in the decoder's own batches, and waits."""
    import torch

    from gpusync.codec.device.batches import cut_batches
    from gpusync.codec.device.nvcomp import ZstdCodec
    from gpusync.codec.device.staging import PinnedRing

    ring = PinnedRing(decoder.device)
    batches = list(cut_batches(frames, stored_bytes=decoder.stored_bytes, decoded_bytes=decoder.batch_bytes))
    stored = [torch.empty(batch.stored_bytes, dtype=torch.uint8, device=decoder.device) for batch in batches]
    torch.cuda.synchronize(decoder.device)
    for batch, target in zip(batches, stored, strict=True):
        ring.send(batch.pieces, target)
    torch.cuda.synchronize(decoder.device)
    codec = ZstdCodec(decoder.device, ring.stream)

    def decode() -> None:
        for batch, source in zip(batches, stored, strict=True):
            places, lengths = [at for at, _ in batch.pieces], [len(piece) for _, piece in batch.pieces]
            codec.decode(source, places, lengths, out, batch.offsets, batch.sizes)
        torch.cuda.synchronize(decoder.device)

    return decode


def frames_of(data: np.ndarray, frame_bytes: int) -> Frames:
    payload = encode_gf01(None, data, transform=FULL, element_bytes=1, float_order=False, frame_bytes=frame_bytes)
    stored = MemoryPayload(payload or b"")
    return list(gf01_frames(stored, read_layout(stored, nbytes=data.size, element_bytes=1), offset=0))


def repeated(frames: Frames, data_bytes: int, frame_bytes: int, nbytes: int) -> Iterator[StoredFrame]:
    """The frames again and again, as far as they fit into `nbytes`."""
    step = -(-data_bytes // frame_bytes) * frame_bytes
    for start in range(0, nbytes, step):
        for frame in frames:
            if start + frame.offset + frame.nbytes <= nbytes:
                yield replace(frame, offset=start + frame.offset)


def holds(found: np.ndarray, frames: Frames, data: np.ndarray, frame_bytes: int) -> bool:
    """Whether every frame's bytes are where they belong."""
    step = -(-data.size // frame_bytes) * frame_bytes
    return all(
        np.array_equal(
            found[frame.offset : frame.offset + frame.nbytes],
            data[frame.offset % step : frame.offset % step + frame.nbytes],
        )
        for frame in frames
    )


def wrong(row: dict[str, object]) -> dict[str, object]:
    """Without its times."""
    return {name: value for name, value in row.items() if "GB/s" not in name} | {"result": "WRONG BYTES"}


def copy_bandwidth(nbytes: int, device: Any, repetitions: int) -> float:
    """Bytes per second, read and written, of a plain copy on the device."""
    import torch

    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / best_time(lambda: target.copy_(source), device, repetitions)


def seconds_of(run: Callable[[], object], repetitions: int) -> float:
    """Of the fastest of some runs, after one that warms up."""
    run()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
