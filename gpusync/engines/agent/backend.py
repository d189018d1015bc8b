"""The agent as an endpoint's backend, and the routes that an engine has besides."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpusync.endpoint import (
    ForbiddenPathError,
    HttpReply,
    HttpRequest,
    Outcome,
    RequestError,
    Roots,
    Service,
    Status,
    Update,
    confine,
)
from gpusync.endpoint.messages import parse_object
from gpusync.endpoint.routes import Handler, json_reply, outcome_reply
from gpusync.endpoint.threads import call_in_thread
from gpusync.engines.agent.settings import Place
from gpusync.engines.agent.workers import Workers
from gpusync.errors import GpusyncError, RefusedError

T = TypeVar("T")


class AgentBackend:
    """`place`: the directories that are attached to at the start; without, those of the first update."""

    def __init__(self, workers: Workers, *, place: Place | None = None) -> None:
        self._workers, self._place = workers, place
        self._attached: Place | None = None

    def start(self) -> None:
        """Start the workers, load what the local checkpoint holds or else the model, and attach. Blocks.

        After an error no worker runs.
        """
        workers, place = self._workers, self._place
        try:
            workers.start()
            if place is not None:
                self._recover(place)
            workers.call("load", _as_dict(place))
            if place is not None:
                self._attach(place)
        except GpusyncError as error:
            workers.kill(str(error))
            raise

    async def prepare(self, update: Update) -> Outcome:
        place = Place(source_dir=update.source_dir, local_checkpoint_dir=update.local_checkpoint_dir)

        def work() -> Outcome:
            self._bring_up(place)
            return self._told(
                f"version {update.target_version} is prepared",
                self._workers.call("prepare", {"version": update.target_version}, path=str(place.source_dir)),
            )

        return await self._do(work)

    async def commit(self, version: int) -> Outcome:
        def work() -> Outcome:
            status = self.status()
            if status.prepared != version:
                if status.live == version and status.in_doubt is None:
                    return Outcome(message=f"version {version} is live already", status=status)
                found = "nothing" if status.prepared is None else f"version {status.prepared}"
                raise RefusedError("what is to be committed is not prepared", version=version, found=found)
            return self._told(f"version {version} is live", self._workers.call("commit", {"version": version}))

        return await self._do(work)

    async def abort(self, version: int | None) -> Outcome:
        def work() -> Outcome:
            prepared = self.status().prepared
            if prepared is None or version not in (None, prepared):
                return Outcome(message="nothing of that is prepared", status=self.status())
            self._workers.call("abort")
            return Outcome(message=f"version {prepared} is dropped", status=self.status())

        return await self._do(work)

    async def reload(self, local_checkpoint_dir: Path, version: int | None) -> Outcome:
        """An engine's ordinary reload: commits what is prepared, if that is what is asked for, else loads the files,
        which are brought to what is durable first."""
        prepared = self.status().prepared
        if prepared is not None and version in (None, prepared):
            return await self.commit(prepared)

        def work() -> Outcome:
            place = self._attached
            if place is None or place.local_checkpoint_dir != local_checkpoint_dir:
                raise RefusedError("not the local checkpoint that this agent follows", path=local_checkpoint_dir)
            if self._workers.are_running:
                self._workers.call("abort")
                self._recover(place)
                self._workers.call("load", _as_dict(place))
                self._attach(place)
            else:
                self.start()
            live = self.status().live
            if version is not None and live != version:
                raise RefusedError(
                    "the local checkpoint is reloaded, and is another version", path=place.local_checkpoint_dir,
                    version=version, found=live,
                )  # fmt: skip
            return Outcome(message="reloaded from the local checkpoint", status=self.status())

        return await self._do(work)

    async def digests(self) -> list[object]:
        def work() -> list[object]:
            if not self._workers.are_running:
                raise RefusedError("no worker runs", found=self.status().in_doubt)
            return self._workers.call("digests")

        return await self._do(work)

    def status(self) -> Status:
        self._workers.look()
        return self._workers.status

    def metrics(self) -> str:
        return ""

    def _bring_up(self, place: Place) -> None:
        """Workers that are attached to these directories."""
        attached = self._attached
        if attached is not None and _overlap(attached.local_checkpoint_dir, place.local_checkpoint_dir):
            raise RefusedError(
                "a local checkpoint cannot lie in the one that this agent follows, nor around it",
                path=place.local_checkpoint_dir, found=attached.local_checkpoint_dir,
            )  # fmt: skip
        self._place = self._place or place
        if not self._workers.are_running:
            self._attached = None
            self.start()
        if self._attached != place:
            self._recover(place)  # says what is wrong with the directory while all is as it was
            self._attach(place)

    def _recover(self, place: Place) -> None:
        self._workers.call("recover", _as_dict(place), only=0, path=str(place.local_checkpoint_dir))

    def _attach(self, place: Place) -> None:
        self._attached = None
        try:
            self._workers.call("attach", _as_dict(place), path=str(place.local_checkpoint_dir))
        except GpusyncError as error:
            self._workers.kill(str(error))  # what is attached in part holds back the mirror
            raise
        self._attached = place

    def _told(self, message: str, reports: list[dict[str, object]]) -> Outcome:
        return Outcome(message=message, status=self.status(), report=reports[0])

    async def _do(self, work: Callable[[], T]) -> T:
        return await call_in_thread(work, name="gpusync-agent")


def agent_routes(backend: AgentBackend, service: Service, roots: Roots) -> dict[tuple[str, str], Handler]:
    """What a trainer calls beside the endpoint's own routes, and the digests."""

    async def reload(request: HttpRequest) -> HttpReply:
        fields = parse_object(request.body)
        path, version = fields.get("model_path"), _weight_version(fields.get("weight_version"))
        if not isinstance(path, str):
            raise ForbiddenPathError("model_path is not a path", found=repr(path)[:80])
        local = await call_in_thread(lambda: _confined(path, roots), name="gpusync-resolve")
        return outcome_reply(await service.exclusively("reloading", lambda: backend.reload(local, version)))

    async def digests(request: HttpRequest) -> HttpReply:
        found: list[object] = []

        async def work() -> Outcome:
            found.extend(await backend.digests())
            return Outcome(message="digests of live weights", status=backend.status())

        outcome = await service.exclusively("digesting", work)
        return json_reply(
            200, {"success": True, "message": outcome.message, "live": outcome.status.live, "ranks": found}
        )

    async def nothing(request: HttpRequest) -> HttpReply:
        return json_reply(200, {"success": True, "message": "nothing is generated here"})

    quiet = {(method, path): nothing for path in QUIET for method in ("GET", "POST")}
    return {**quiet, ("POST", "/update_weights_from_disk"): reload, ("GET", "/weights/digests"): digests}


def _confined(path: str, roots: Roots) -> Path:
    return confine(path, roots.local, places=roots.local_places, what="model_path")


QUIET = ("/pause_generation", "/continue_generation", "/flush_cache")


def _weight_version(value: object) -> int | None:
    """A trainer sends text, or nothing."""
    if value is None:
        return None
    if isinstance(value, int | str) and not isinstance(value, bool) and re.fullmatch("[0-9]{1,13}", str(value)):
        return int(value)
    raise RequestError("weight_version is not a version number", found=repr(value)[:80])


def _overlap(one: Path, other: Path) -> bool:
    return one in other.parents or other in one.parents


def _as_dict(place: Place | None) -> dict[str, object]:
    if place is None:
        return {}
    return {"source_dir": str(place.source_dir), "local_checkpoint_dir": str(place.local_checkpoint_dir)}
