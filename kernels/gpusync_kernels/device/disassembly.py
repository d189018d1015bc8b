"""Kernels compiled for a GPU that need not be here, and what their binaries hold: registers, stack, instructions.

Triton brings ptxas, cuobjdump and nvdisasm; no driver is needed. For tests, benchmarks and the figures of the README.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpusync_kernels.device.configurations import Configuration

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTER_ALIGN = 16

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(?:.*`\((\.L_x_\d+)\))?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """`target`: the label that a branch goes to."""

    opcode: str
    predicated: bool
    target: str | None


@dataclass(frozen=True, slots=True)
class Binary:
    """`stack_bytes` counts spills and local memory too. `labels`: label -> number of the instruction after it."""

    registers: int
    stack_bytes: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @property
    def opcodes(self) -> tuple[str, ...]:
        return tuple(each.opcode for each in self.instructions)

    def shortest_path(self, pattern: str, times: int) -> int:
        """Instructions on the shortest way from entry to exit that meets `times` opcodes matching `pattern`.

        A lower bound on what a warp issues; exact for a program whose loops ptxas unrolled and whose hot path is told
        from the cold ones by its loads or stores. Subroutines (64-bit division) count as one instruction.
        """
        queue, seen = [(1, 0, 0)], set()
        while queue:
            length, at, met = heapq.heappop(queue)
            if (at, met) in seen or at >= len(self.instructions):
                continue
            seen.add((at, met))
            each = self.instructions[at]
            met = min(times, met + (re.fullmatch(pattern, each.opcode) is not None))
            if each.opcode.startswith("EXIT") and met == times:
                return length
            for after in self._successors(at, each):
                heapq.heappush(queue, (length + 1, after, met))
        raise ValueError(f"no way to an exit meets {times} of {pattern}")

    def _successors(self, at: int, each: Instruction) -> Iterator[int]:
        if each.opcode.startswith("BRA") and each.target is not None:
            yield self.labels[each.target]
        if each.predicated or not each.opcode.startswith(("BRA", "EXIT", "RET")):
            yield at + 1


def compile_for(configuration: Configuration, capability: int) -> Binary:
    """The binary that a launch of this configuration runs on a GPU of this compute capability (90 = 9.0)."""
    names = list(configuration.kernel.arg_names)
    types = {**configuration.pointers, **dict.fromkeys(configuration.constants, "constexpr")}
    source = ASTSource(
        fn=configuration.kernel,
        signature={name: types[name] for name in names},
        constexprs=configuration.constants,
        attrs={(names.index(name),): [["tt.divisibility", POINTER_ALIGN]] for name in configuration.pointers},
    )
    options = {"num_warps": configuration.num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return read_binary(compiled.asm["cubin"])


def read_binary(cubin: bytes) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    registers, stack, _, local = (int(value) for value in USAGE.findall(usage)[-1])
    return Binary(registers, stack + local, *_parse(listing))


def _parse(listing: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label, found = LABEL.match(line), INSTRUCTION.match(line)
        if label is not None:
            labels[label[1]] = len(instructions)
        elif found is not None and found[2] != "NOP":
            instructions.append(Instruction(found[2], found[1] is not None, found[3]))
    return tuple(instructions), labels


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
