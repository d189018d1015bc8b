"""What each device operation costs: measured where there is a device, else compiled, counted and predicted.

    python benchmarks/bench_kernels.py [--mib 1024] [--toy]

Measured: every operation beside a plain copy of the same bytes, on a CUDA device, else the references on the host;
each result is verified after timing (a wrong one prints no time). Predicted, where triton is installed: what the
binaries for an H200 hold, and the times that follow for a rank of 60 GB.
"""

from __future__ import annotations

import argparse
import platform
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import gpusync_kernels as k

RANK_BYTES = 60e9
COPY_BYTES_PER_S = 4.3e12  # H200, read and written, measured elsewhere
PEAK_BYTES_PER_S = {"H200": 4.8e12, "A100": 2.04e12}
WARP_INSTRUCTIONS_PER_S = 132 * 4 * 1.98e9  # H200: one per scheduler and cycle
DENSITY = 0.01
TOUCHED = 1 - (1 - DENSITY) ** 16  # of 32-byte sectors of 2-byte elements that change independently
BLOB = 0.006  # bytes of GS01 per byte of tensor at this density


@dataclass(frozen=True, slots=True)
class Figure:
    """One operation on 2-byte elements: its main configuration, the bytes of tensor that a program covers, and the
    bytes read and written per byte of tensor.
    """

    configuration: str
    program_bytes: float
    read: float
    written: float
    met: tuple[str, int]  # what tells the main path of the binary: a pattern of opcodes, and how many it executes


FIGURES = {
    "copy": Figure("copy-UNIT=16-TILE=1024", 16384, 1, 1, ("STG.*", 8)),
    "xor": Figure("xor-UNIT=16-TILE=1024", 16384, 2, 1, ("STG.*", 8)),
    "overwrite, 1 % of words": Figure(
        "changes-MODE=0-ELEMENT=2-TILE=1024", 1024 * 2 / DENSITY, TOUCHED + 3 * DENSITY, TOUCHED, ("STG.*", 8)
    ),
    "sparse, 1 % of elements": Figure("sparse-ELEMENT=2", 512 * 2 / DENSITY, TOUCHED + BLOB, TOUCHED, ("STG.*", 4)),
    "sparse check": Figure("sparse_check", 512 * 2 / DENSITY, BLOB + 16 * DENSITY, 16 * DENSITY, ("ATOM.*", 4)),
    "full planes": Figure("write_planes-ELEMENT=2-UNIT=16-TILE=128", 4096, 1, 1, ("STG.*", 2)),
    "step planes": Figure("write_planes-ELEMENT=2-UNIT=16-TILE=128", 4096, 2, 1, ("LDG.*128.*", 4)),
    "block sums": Figure("block_sums-XOR=False-BLOCKS=32", 32768, 1, 1 / 16, ("LDG.*128.*", 32)),
    "xor + block sums": Figure("block_sums-XOR=True-BLOCKS=32", 32768, 2, 17 / 16, ("LDG.*128.*", 48)),
    "adler32": Figure("adler32-FLAT=True-TILE=4096", 4096, 1, 0, ("RED.*ADD.*", 2)),
    "cast BF16 to F32": Figure("cast-SOURCE=2-TARGET=4-TILE=1024", 2048, 1, 2, ("STG.*", 8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensor per operation")
    parser.add_argument("--toy", action="store_true", help="1 MiB, one repetition: does it run at all")
    arguments = parser.parse_args()
    device, reason = choose_device()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    if device is None:
        line = f"GPU path inactive: {reason}. Host references below; GPU times are predictions."
        print(f"+{'-' * (len(line) + 2)}+\n| {line} |\n+{'-' * (len(line) + 2)}+")
    else:
        print(reason)
    operands = Operands((1 if arguments.toy else arguments.mib) << 20, device)
    print_measured(operands, repetitions=1 if arguments.toy else 5)
    if find_spec("triton") is not None and find_spec("torch") is not None:
        print_predicted()


def choose_device() -> tuple[Any, str]:
    """`(torch device or None, reason)`."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return None, "torch or triton is not installed"
    import torch

    if not torch.cuda.is_available():
        return None, "no CUDA device"
    return torch.device("cuda"), torch.cuda.get_device_name()


def print_measured(operands: Operands, *, repetitions: int) -> None:
    """Bandwidth counts bytes read and written as `FIGURES` does; every row is compared with the plain copy."""
    rows, plain = [], 0.0
    for operation, run, verify in cases(operands):
        seconds = best_time(run, operands.device, repetitions)
        verify()
        figure = FIGURES.get(operation, FIGURES["copy"])
        bandwidth = operands.nbytes * (figure.read + figure.written) / seconds
        plain = plain or bandwidth
        rows.append((operation, f"{seconds * 1e3:.3f}", f"{bandwidth / 1e9:.2f}", f"{bandwidth / plain:.0%}"))
    where = "the host (references)" if operands.device is None else str(operands.device)
    title = f"Measured on {where}, {operands.nbytes >> 20} MiB of tensor"
    print_table(title, ("operation", "ms", "GB/s", "of a plain copy"), rows)


def print_predicted() -> None:
    """From the binary for sm_90: the instructions on the main path of a program, and the bytes that must move."""
    from gpusync_kernels.device.configurations import configurations
    from gpusync_kernels.device.disassembly import compile_for

    by_name = {each.name: each for each in configurations()}
    rows = []
    for operation, figure in FIGURES.items():
        configuration = by_name[figure.configuration]
        binary = compile_for(configuration, 90)
        instructions = binary.shortest_path(*figure.met) * configuration.num_warps / figure.program_bytes
        traffic = figure.read + figure.written
        issue = RANK_BYTES * instructions / WARP_INSTRUCTIONS_PER_S
        predicted = max(RANK_BYTES * traffic / COPY_BYTES_PER_S, issue)
        roofs = [RANK_BYTES * traffic / peak for peak in PEAK_BYTES_PER_S.values()]
        times = [f"{seconds * 1e3:.1f}" for seconds in (*roofs, issue, predicted)]
        counts = (str(binary.registers), f"{figure.read:.3f}", f"{figure.written:.3f}", f"{instructions * 1024:.1f}")
        rows.append((operation, *counts, *times))
    header = ("operation", "registers", "read/byte", "written/byte", "warp instr./KiB")
    header += (*(f"{name} roof, ms" for name in PEAK_BYTES_PER_S), "issue, ms", "predicted H200, ms")
    print_table("Predicted for a rank of 60 GB, not measured (sm_90 binaries)", header, rows)


def print_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, tuple("-" * width for width in widths), *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def best_time(run: Callable[[], object], device: Any, repetitions: int) -> float:
    """Seconds of the fastest of some runs, after one that compiles and binds."""
    run()
    if device is None:
        times = []
        for _ in range(repetitions):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)
    import torch

    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return min(begin.elapsed_time(end) for begin, end in events) / 1e3


class Operands:
    """One tensor of random bytes as a source, and destinations, on the device or the host."""

    def __init__(self, nbytes: int, device: Any) -> None:
        self.nbytes, self.device = nbytes, device
        self.rng = np.random.default_rng(0)
        self.bytes = self.rng.integers(0, 256, nbytes, dtype=np.uint8)
        self.src, self.dst = self.place(self.bytes), self.place(np.zeros(nbytes, np.uint8))
        self.table, self.layout = k.SegmentTable.flat(nbytes=nbytes), k.SumsLayout.of([nbytes])

    def place(self, array: np.ndarray) -> Any:
        if self.device is None:
            return array.copy()
        import torch

        signed = array.view(array.dtype.str.replace("u4", "i4"))
        return torch.from_numpy(signed.copy()).to(self.device)

    def expect(self, expected: np.ndarray) -> Callable[[], None]:
        """Asserts what the destination holds, then clears it."""

        def verify() -> None:
            assert np.array_equal(host(self.dst).view(expected.dtype), expected)
            self.dst[...] = 0

        return verify


def host(buffer: Any) -> np.ndarray:
    return buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()


Case = tuple[str, Callable[[], object], Callable[[], None]]


def cases(o: Operands) -> Iterator[Case]:
    """`(operation, run, verify)`. Whatever the number of runs, the result is known."""
    moves = k.bind_moves(o.table, dst=[o.dst], src=[o.src])
    yield "plain copy", lambda: o.dst.__setitem__(..., o.src), o.expect(o.bytes)
    yield "copy", lambda: k.copy_segments(moves), o.expect(o.bytes)

    def xor_twice_or_once() -> None:
        found = host(o.dst)
        o.expect(o.bytes if found.any() else np.zeros_like(found))()

    yield "xor", lambda: k.xor_segments(moves), xor_twice_or_once
    yield overwrite_case(o)
    yield from sparse_cases(o)
    planes = k.bind_planes(o.table, dst=[o.dst], planes=[k.Planes(data=o.src, element_bytes=2)])
    full = np.stack([o.bytes[: o.nbytes // 2], o.bytes[o.nbytes // 2 :]], axis=1).reshape(-1)
    yield "full planes", lambda: k.write_full_planes(planes), o.expect(full)
    yield from digest_cases(o)
    wide = o.place(np.zeros(2 * o.nbytes, np.uint8))
    elements = k.SegmentTable.flat(nbytes=o.nbytes // 2)
    casts = k.bind_casts(elements, dst=[wide], src=[o.src], dst_dtypes=["F32"], src_dtypes=["BF16"])

    def verify_cast() -> None:
        assert np.array_equal(host(wide).view("<u4"), o.bytes.view("<u2").astype(np.uint32) << np.uint32(16))

    yield "cast BF16 to F32", lambda: k.cast_segments(casts), verify_cast


def positions_of(o: Operands) -> np.ndarray:
    return np.sort(o.rng.choice(o.nbytes // 2, int(o.nbytes // 2 * DENSITY), replace=False))


def overwrite_case(o: Operands) -> Case:
    positions = positions_of(o)
    words = np.full(positions.size, 0x0707, np.uint16).view(np.uint8)
    change = k.Change(source=0, positions=o.place(positions.astype(np.uint32)), words=o.place(words))
    bound = k.bind_changes(o.table, dst=[o.dst], changes=[change], element_bytes=2)
    expected = np.zeros(o.nbytes // 2, np.uint16)
    expected[positions] = 0x0707
    return "overwrite, 1 % of words", lambda: k.overwrite_words(bound), o.expect(expected)


def sparse_cases(o: Operands) -> Iterator[Case]:
    """One stream of +1 steps; applied and reverted in turn, so that any number of runs leaves a known state."""
    positions = positions_of(o)
    blob = step_blob(positions, o.nbytes // 2)
    payload = k.Payload(source=0, data=o.place(blob), blob=k.parse_blob(blob, blob.size))
    bound = k.bind_sparse(o.table, dst=[o.dst], payloads=[payload])
    runs = 0

    def run() -> None:
        nonlocal runs
        (k.sparse_revert if runs % 2 else k.sparse_apply)(bound)
        runs += 1

    def verify() -> None:
        expected = np.zeros(o.nbytes // 2, np.uint16)
        expected[positions] = runs % 2
        o.expect(expected)()

    yield "sparse, 1 % of elements", run, verify
    sound = []

    def verify_check() -> None:
        assert all(each.all() for each in sound)

    yield "sparse check", lambda: sound.append(k.sparse_check([payload])), verify_check


def step_blob(positions: np.ndarray, elements: int, low_bits: int = 6) -> np.ndarray:
    """A GS01 blob of one stream: +1 at every position, gaps split at 6 bits, which suits 1 %."""
    gaps = np.diff(positions, prepend=-1) - 1
    ones = np.cumsum(gaps >> low_bits) + np.arange(positions.size)
    nbits = int(ones[-1]) + 1
    bits = np.zeros(-(-nbits // 32) * 32, np.uint8)
    bits[ones] = 1
    starts = np.arange(0, nbits, 1024)
    ranks = np.searchsorted(ones, starts)
    last = np.maximum(ranks, 1) - 1
    reached = np.where(ranks > 0, positions[last] + 1 + ((starts - ones[last] - 1) << low_bits), starts << low_bits)
    fields = (gaps & ((1 << low_bits) - 1))[:, None] >> np.arange(low_bits + 1) & 1
    fields[:, low_bits] = 0
    packed = np.pad(fields.astype(np.uint8).reshape(-1), (0, -fields.size % 32))
    body = np.stack([reached, ranks], 1).astype("<u4").tobytes()
    body += np.packbits(bits, bitorder="little").tobytes() + np.packbits(packed, bitorder="little").tobytes()
    head = struct.pack("<4sBBBBQII", b"GS01", 2, 0, 31, 0, elements, 1, 0)
    head += struct.pack("<IIIBBBB", positions.size, nbits, 0, 0, low_bits, 1, 0)
    return np.frombuffer(head + body + bytes(-len(body) % 8 + 8), np.uint8)


def digest_cases(o: Operands) -> Iterator[Case]:
    plain = k.bind_sums(o.table, o.layout, dst=[o.src])
    fused = k.bind_sums(o.table, o.layout, dst=[o.dst], payload=[o.src])
    adler = k.bind_adler32(o.table, [o.nbytes], dst=[o.src])
    sums, fused_sums, partials = plain.zeros(), fused.zeros(), []
    words_row = o.layout.rows - 1  # of words after the last whole block: added to, where blocks are written

    def run_plain() -> None:
        sums[words_row] = 0
        k.block_sums(plain, sums)

    def run_fused() -> None:
        fused_sums[words_row] = 0
        k.xor_block_sums(fused, fused_sums)

    def verify(bound: Any, found: Any) -> Callable[[], None]:
        def verify_digest() -> None:
            tails = k.gather_tails(bound)
            expected = k.chain_digests(o.layout, k.block_sums(bound), tails)
            assert np.array_equal(k.chain_digests(o.layout, found, tails), expected)

        return verify_digest

    def verify_adler() -> None:
        assert k.adler32_checksums([o.nbytes], partials[-1])[0] == zlib.adler32(o.bytes)

    yield "block sums", run_plain, verify(plain, sums)
    yield "xor + block sums", run_fused, verify(fused, fused_sums)
    yield "adler32", lambda: partials.append(k.adler32_partials(adler)), verify_adler


if __name__ == "__main__":
    main()
