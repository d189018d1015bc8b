"""Training runs against a real vLLM server: what each version must look like, and the calls that bring it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusync import Publisher
from gpusync.publish import StoredBytes
from support.checkpoints import State
from support.hf_models import HfModel, next_state
from support.slime import publish_delta
from support.vllm_server import Reply, VllmServer


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a server without gpusync serves of every version: its checksums of each rank's weights, and its tokens."""

    states: Sequence[State]
    checksums: Sequence[Mapping[str, str]]
    tokens: Sequence[list[int]]
    plain: Sequence[Path]

    @property
    def base(self) -> Path:
        return self.plain[0]


def make_reference(model: HfModel, versions: int, *, root: Path, python: Path, site: Path, **options: Any) -> Reference:
    """A server is started on the newest version, and reloads the others from plain checkpoints. `site` holds gpusync
    for its switch of linear layers alone; `options` are the server's."""
    states = [model.state]
    for version in range(1, versions + 1):
        states.append(next_state(states[-1], version))
    plain = [
        HfModel(config=model.config, state=state).write(root / f"plain{number}") for number, state in enumerate(states)
    ]
    checksums: list[Mapping[str, str]] = [{} for _ in states]
    tokens: list[list[int]] = [[] for _ in states]
    log = root / "reference.log"
    with VllmServer(python, plain[-1], log=log, site=site, ours=False, **options) as server:
        for version in reversed(range(versions + 1)):
            if version != versions:
                server.reload(plain[version])
            checksums[version], tokens[version] = server.checksums(), server.tokens()
    assert len({tuple(each) for each in tokens}) == len(tokens), "versions that say the same show nothing"
    return Reference(states=states, checksums=checksums, tokens=tokens, plain=plain)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stream and one local checkpoint, followed by a server whose weights are the base to begin with."""

    server: VllmServer
    reference: Reference
    source: Path
    local: Path

    def publish(self, *versions: int, encoding: str | None = None, **options: Any) -> None:
        """In slime's format; xor and overwrite by turns unless one is named."""
        for version in versions:
            base = options.get("base_version", version - 1)
            old, new = self.reference.states[base], self.reference.states[version]
            kind = encoding or ("xor", "overwrite")[version % 2]
            publish_delta(self.source, version, old, new, encoding=kind, shards=2, **options)

    def publish_ours(self, versions: int, **options: Any) -> None:
        publisher = Publisher(self.source, base_dir=self.reference.base, encoding="gpusync", **options)
        for state in self.reference.states[1 : versions + 1]:
            publisher.publish(
                {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in state.items()}
            )

    def ask(self, route: str, version: int, **more: object) -> Reply:
        body = {"local_checkpoint_dir": str(self.local), "source_dir": str(self.source), "target_version": version}
        return self.server.post(route, {**body, **more})

    def pull(self, version: int) -> dict[str, Any]:
        status, reply = self.ask("/pull_weights", version)
        assert status == 200, reply
        assert reply["success"], reply
        return reply

    def commit(self, version: int) -> dict[str, Any]:
        status, reply = self.server.post("/commit_weights", {"target_version": version})
        assert status == 200, reply
        assert (reply["live"], reply["prepared"]) == (version, None), reply
        return reply

    def update(self, version: int) -> dict[str, Any]:
        """The two calls of an update, with what must hold between them."""
        before = self.server.checksums()
        told = self.pull(version)
        assert told["prepared"] == version, told
        assert self.server.checksums() == before, "a pull has changed live weights"
        self.commit(version)
        self.assert_live(version)
        return told

    def assert_live(self, version: int) -> None:
        """Every rank's weights and what they say are those of a server without gpusync."""
        assert self.server.checksums() == self.reference.checksums[version]
        assert self.server.tokens() == self.reference.tokens[version]
        assert self.server.weight_version() == str(version)

    def status(self) -> dict[str, Any]:
        status, reply = self.server.get("/weights/version")
        assert status == 200, reply
        return reply


def begin_run(server: VllmServer, reference: Reference, root: Path) -> Run:
    server.reload(reference.base)
    (root / "stream").mkdir()
    return Run(server=server, reference=reference, source=root / "stream", local=root / "local")
