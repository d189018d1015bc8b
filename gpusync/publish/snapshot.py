"""What the readers hold, as deltas are made against it. It moves on only when a version is durable.

Two kinds: kept in memory (a trainer's, publishing again and again), and read back from the stream each time (one
publish from one directory to another, in little memory).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from gpusync.codec import U8, Payload
from gpusync.errors import PublishError
from gpusync.publish.changes import Change, read_whole
from gpusync.publish.state import PublishedState
from gpusync.publish.tensors import TensorForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What a durable version was. `changes` are this rank's, with first values of tensors among them (no byte changed);
    `forms` are those of all tensors offered on any rank, `changed` names the tensors with payloads, `moved` those whose
    bytes are no longer the newest version's (the same, but for a delta on an older one). `older` is the state of that
    older version, None where the delta was made on the newest.
    """

    version: int
    is_full: bool
    changes: Mapping[str, Change]
    forms: Mapping[str, TensorForm]
    changed: Collection[str]
    moved: Collection[str]
    older: PublishedState | None = None


class Snapshot(Protocol):
    """Old states, by tensor. `open` comes from several threads, for different tensors."""

    @property
    def keeps(self) -> bool:
        """Whether `advance` needs changes that were kept."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The tensors of the checkpoint the readers hold, as far as it is known."""
        ...

    def lacks(self, name: str) -> bool:
        """True if the readers are known not to hold this tensor."""
        ...

    def form(self, name: str) -> TensorForm | None:
        """The form the tensor must have; None where none is known."""
        ...

    def open(self, name: str, *, hold: bool = True) -> U8 | Payload | None:
        """The old bytes, None where none are known. Not to be written to. `hold`: they will be asked for again."""
        ...

    def branch(self, version: int) -> PublishedState:
        """The state of an older version. Errors as `PublishedState.branch`."""
        ...

    def advance(self, step: Advance) -> None:
        """The version is durable: be there. Does nothing that can fail."""
        ...

    def close(self) -> None:
        """Let go of files until the next `open`."""
        ...


class MemorySnapshot:
    """Keeps every tensor that this rank has offered, in memory; each is read from the stream or the base once."""

    keeps = True

    def __init__(self, state: PublishedState) -> None:
        self._state = state
        self._held: dict[str, U8] = {}
        self._held_forms: dict[str, TensorForm] = {}
        self._elsewhere: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        return self._state.names if self._state.is_known else {*self._held, *self._elsewhere}

    def lacks(self, name: str) -> bool:
        return self._state.is_known and name not in self._state.names

    def form(self, name: str) -> TensorForm | None:
        return self._held_forms.get(name) or self._state.form(name)

    def open(self, name: str, *, hold: bool = True) -> U8 | Payload | None:
        held = self._held.get(name)
        if held is not None:
            return held
        source = self._state.open(name)
        if source is None:
            if name in self._elsewhere:
                # Taking the given value for the old one here would lose what changed since the other rank had it.
                raise PublishError(
                    "another rank offered this tensor before; its old state is not known here, base_dir would tell",
                    tensor=name,
                )
            return None
        if hold:
            source = self._held[name] = read_whole(source)
        return source

    def branch(self, version: int) -> PublishedState:
        return self._state.branch(version)

    def advance(self, step: Advance) -> None:
        for name, change in step.changes.items():
            self._held[name] = change.apply_to(self._held.get(name))
            self._held_forms[name] = step.forms[name]
        for name in set(step.moved).difference(step.changes):
            self._held.pop(name, None)
        self._elsewhere.update(name for name in step.forms if name not in self._held)
        _follow(self._state, step)

    def close(self) -> None:
        self._state.close()


class StreamSnapshot:
    """Keeps nothing: reads the base checkpoint, and the deltas published on it, for every publish anew."""

    keeps = False

    def __init__(self, state: PublishedState) -> None:
        self._state = state

    @property
    def names(self) -> Collection[str]:
        return self._state.names

    def lacks(self, name: str) -> bool:
        return name not in self._state.names

    def form(self, name: str) -> TensorForm | None:
        return self._state.form(name)

    def open(self, name: str, *, hold: bool = True) -> U8 | Payload | None:
        return self._state.open(name)

    def branch(self, version: int) -> PublishedState:
        return self._state.branch(version)

    def advance(self, step: Advance) -> None:
        _follow(self._state, step)

    def close(self) -> None:
        self._state.close()


def _follow(state: PublishedState, step: Advance) -> None:
    if step.older is not None:
        state.adopt(step.older)
    if step.is_full:
        state.follow_full(step.version, forms=step.forms)
    else:
        state.follow(step.version, changed=step.changed)
