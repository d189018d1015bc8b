"""What the ranks tell each other before they work together, and whether they may. Pure.

Every rank posts a hello; rank 0 makes the roster of them, which is the same for all. What has to be equal is the
plugin's version and every capability; `details` may differ and are there for reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpusync.verdict.errors import GroupFailedError, HandshakeError
from gpusync.verdict.hosts import HostIdentity, Hosts, ProcessIdentity

# Of the messages between ranks. Ranks of another protocol are told apart before anything else of theirs is read.
PROTOCOL = 1

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """One rank's. `nonce` is new for every attempt, so that what an earlier attempt left behind is seen to be stale.

    `problem`: why this rank cannot take part; then nobody does.
    """

    nonce: str
    version: str
    host: HostIdentity
    process: ProcessIdentity
    capabilities: Mapping[str, Fact] = field(default_factory=dict)
    details: Mapping[str, Fact] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who takes part in `generation`, by rank. With a `problem` nobody does; `missing` are those that did not come."""

    generation: int
    hellos: tuple[Hello | None, ...]
    problem: str | None = None
    missing: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[Hello, ...]:
        return tuple(hello for hello in self.hellos if hello is not None)

    @property
    def hosts(self) -> Hosts:
        return Hosts.of([hello.host for hello in self.members])

    @property
    def nonces(self) -> set[str]:
        return {hello.nonce for hello in self.members}

    def check(self) -> None:
        """Raises HandshakeError if the ranks may not work together, GroupFailedError naming those that did not come."""
        if self.missing:
            raise GroupFailedError(str(self.problem), missing=self.missing)
        if self.problem is not None:
            raise HandshakeError(f"the ranks may not work together: {self.problem}")


def find_disagreement(hellos: Sequence[Hello]) -> str | None:
    """Why these ranks may not work together, naming them; None if they may. Rank 0's is what is expected."""
    reasons = []
    for rank, hello in enumerate(hellos):
        told = [hello.problem] if hello.problem is not None else _differences(hello, hellos[0])
        if told:
            reasons.append(f"rank {rank} (host {hello.host.name}): {', '.join(told)}")
    return "; ".join(reasons) or None


def _differences(hello: Hello, first: Hello) -> list[str]:
    told = []
    if hello.version != first.version:
        told.append(f"gpusync {hello.version}, rank 0 has {first.version}")
    for name in sorted({*hello.capabilities, *first.capabilities}):
        mine, expected = (_tell(side.capabilities, name) for side in (hello, first))
        if mine != expected:
            told.append(f"{name} is {mine}, on rank 0 {expected}")
    return told


def _tell(capabilities: Mapping[str, Fact], name: str) -> str:
    return json.dumps(capabilities[name]) if name in capabilities else "missing"


def encode_hello(hello: Hello) -> str:
    return json.dumps(_as_object(hello))


def parse_hello(text: str) -> Hello:
    """What is not a hello of this protocol is returned as one with a problem that says so."""
    facts = _parse_object(text)
    if facts.get("protocol") == PROTOCOL:
        return _build_hello(facts)
    return Hello(
        nonce=str(facts.get("nonce")),
        version=str(facts.get("version")),
        host=HostIdentity(boot_id="", local_dir="", name="unknown"),
        process=ProcessIdentity(pid=0, namespace="", start=""),
        problem=f"gpusync {facts.get('version')} speaks protocol {facts.get('protocol')}, not {PROTOCOL}",
    )


def encode_roster(roster: Roster) -> str:
    hellos = [None if hello is None else _as_object(hello) for hello in roster.hellos]
    return json.dumps({**asdict(roster), "protocol": PROTOCOL, "hellos": hellos})


def parse_roster(text: str) -> Roster:
    """Of a roster of another protocol only the nonces are told, and a problem that says so."""
    facts = _parse_object(text)
    hellos = tuple(None if hello is None else parse_hello(json.dumps(hello)) for hello in facts["hellos"])
    if facts.get("protocol") != PROTOCOL:
        reason = facts.get("problem") or f"rank 0 speaks protocol {facts.get('protocol')}, not {PROTOCOL}"
        return Roster(generation=0, hellos=hellos, problem=str(reason))
    return Roster(
        generation=facts["generation"], hellos=hellos, problem=facts["problem"], missing=tuple(facts["missing"])
    )


def _as_object(hello: Hello) -> dict[str, Any]:
    return {"protocol": PROTOCOL, **asdict(hello)}


def _parse_object(text: str) -> dict[str, Any]:
    facts = json.loads(text)
    return facts if isinstance(facts, dict) else {}


def _build_hello(facts: Mapping[str, Any]) -> Hello:
    told = {name: fact for name, fact in facts.items() if name != "protocol"}
    told["host"] = HostIdentity(**told["host"])
    told["process"] = ProcessIdentity(**told["process"])
    return Hello(**told)
