"""The inner loops over changed elements on the host, chosen once: plain numpy, or numba where it is installed.

Both give the same bytes. Numba decodes and adds steps about twice as fast, and encodes 1.5 times; its loops release
the interpreter lock, so that threads share them.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from gpusync_kernels import host_numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOps:
    """What `host_numpy` documents, function by function, under the same names.

    `are_sound(data, blob)`: `host_numba_check` documents it; None where one stream after the other takes as long.
    """

    name: str
    is_compiled: bool
    decode_bits: Callable[..., tuple[Any, Any, Any]]
    set_marks: Callable[..., bool]
    add_steps: Callable[..., None]
    add_streams: Callable[..., None]
    change_words: Callable[..., None]
    changed_positions: Callable[..., Any]
    find_steps: Callable[..., tuple[Any, Any] | None]
    pack_changes: Callable[..., tuple[int, Any, Any, Any]]
    are_sound: Callable[..., bool] | None = None


NUMPY = HostOps(
    name="numpy",
    is_compiled=False,
    decode_bits=host_numpy.decode_bits,
    set_marks=host_numpy.set_marks,
    add_steps=host_numpy.add_steps,
    add_streams=host_numpy.add_streams,
    change_words=host_numpy.change_words,
    changed_positions=host_numpy.changed_positions,
    find_steps=host_numpy.find_steps,
    pack_changes=host_numpy.pack_changes,
)

_lock = threading.Lock()
_chosen: list[tuple[HostOps, str]] = []


def choose_host_ops(wanted: Literal["auto", "numpy", "numba"] = "auto") -> tuple[HostOps, str]:
    """`(loops, reason)`. "numba" raises ImportError where it cannot be had, "auto" takes numpy then."""
    if wanted == "numpy":
        return NUMPY, "numpy was asked for"
    try:
        from gpusync_kernels import host_numba, host_numba_check
    except ImportError as error:
        if wanted == "numba":
            raise
        is_there = importlib.util.find_spec("numba") is not None
        return NUMPY, f"numba cannot be imported: {error}" if is_there else "the extra `fast` would add numba"
    ops = HostOps(
        name="numba",
        is_compiled=True,
        decode_bits=host_numba.decode_bits,
        set_marks=host_numba.set_marks,
        add_steps=host_numba.add_steps,
        add_streams=host_numba.add_streams,
        change_words=host_numba.change_words,
        changed_positions=host_numba.changed_positions,
        find_steps=host_numba.find_steps,
        pack_changes=host_numba.pack_changes,
        are_sound=host_numba_check.are_sound,
    )
    return ops, f"numba is installed, {host_numba.CACHING}"


def host_ops() -> HostOps:
    """The loops of this process; the first call chooses."""
    return _choice()[0]


def host_ops_reason() -> str:
    return _choice()[1]


@contextmanager
def using_host_ops(ops: HostOps) -> Iterator[None]:
    """Other loops for a while, in all threads: for tests and benchmarks that compare them."""
    before = list(_chosen)
    _chosen[:] = [(ops, f"{ops.name} was asked for")]
    try:
        yield
    finally:
        _chosen[:] = before


def _choice() -> tuple[HostOps, str]:
    if not _chosen:
        with _lock:
            if not _chosen:
                _chosen.append(choose_host_ops())
    return _chosen[0]
