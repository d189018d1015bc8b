"""Every kernel with every set of constants that a launcher can choose, compiled for real GPUs and read as machine
code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from gpusync_kernels.device.configurations import configurations
from gpusync_kernels.device.disassembly import CAPABILITIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = [each.name for each in configurations()]
MAX_REGISTERS = 128


@dataclass(frozen=True)
class Report:
    registers: int
    stack_bytes: int
    opcodes: list[str]

    def count(self, pattern: str) -> int:
        return sum(re.fullmatch(pattern, opcode) is not None for opcode in self.opcodes)


def report(capability: int) -> dict[str, Report]:
    command = [sys.executable, str(Path(__file__).with_name("aot_report.py")), str(capability)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-5000:]
    return {name: Report(*row) for name, *row in map(json.loads, run.stdout.splitlines())}


@pytest.fixture(scope="module")
def binaries() -> dict[int, dict[str, Report]]:
    """By capability and name. One process each, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CAPABILITIES, pool.map(report, CAPABILITIES), strict=True))


def test_names_are_unique():
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_no_stack_and_few_registers(binaries, name):
    for capability, compiled in binaries.items():
        binary = compiled[name]
        assert binary.stack_bytes == 0, f"sm_{capability}: {binary.stack_bytes} bytes of stack"
        assert binary.count(r"(LDL|STL).*") == 0, f"sm_{capability}: spills"
        assert binary.registers <= MAX_REGISTERS, f"sm_{capability}: {binary.registers} registers"


@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        # a tile of 16 KiB is 8 vectors a thread, on the path without a mask and on the one with it
        ("copy-UNIT=16-TILE=1024", 16, 16),
        ("xor-UNIT=16-TILE=1024", 32, 16),
    ],
)
def test_tiles_move_in_128_bits(binaries, name, loads, stores):
    for capability, compiled in binaries.items():
        binary = compiled[name]
        assert binary.count(r"LDG\.E\.128.*") == loads, f"sm_{capability}"
        assert binary.count(r"STG\.E\.128.*") == binary.count(r"STG.*") == stores, f"sm_{capability}"
        assert binary.count(r"LDG.*") - loads <= 9, f"sm_{capability}: more than the piece's row and its number"


@pytest.mark.parametrize("xor", [False, True])
def test_block_sums_load_and_store_in_128_bits(binaries, xor):
    """Whatever ptxas unrolls: every access to words, keys, payload and sums; the rest are the columns of the piece."""
    for capability, compiled in binaries.items():
        binary = compiled[f"block_sums-XOR={xor}-BLOCKS=32"]
        assert binary.count(r"STG\.E\.128.*") == binary.count(r"STG.*") >= 2, f"sm_{capability}"
        assert binary.count(r"LDG\.E\.128.*") >= (3 if xor else 2) * 2, f"sm_{capability}"
        assert binary.count(r"LDG.*") - binary.count(r"LDG\.E\.128.*") <= 11, f"sm_{capability}"


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("kernel", ["write_planes", "read_planes"])
def test_aligned_planes_are_vectors(binaries, kernel, width):
    """No access of a single element: 16 bytes a lane, 8 for planes of the widest."""
    name = f"{kernel}-ELEMENT={width}-UNIT=16-TILE={64 if width == 8 else 128}"
    for capability, compiled in binaries.items():
        binary = compiled[name]
        assert binary.count(r"STG\.E\.(64|128).*") == binary.count(r"STG.*"), f"sm_{capability}"
        assert binary.count(r"LDG\.E\.(U8|S8|U16|S16).*") == 0, f"sm_{capability}"


def test_the_chain_is_one_warp_without_barriers(binaries):
    for compiled in binaries.values():
        for finish in (False, True):
            binary = compiled[f"chain-FINISH={finish}"]
            assert binary.count(r"BAR.*") == 0
            assert binary.count(r"(LDS|STS).*") == 0
