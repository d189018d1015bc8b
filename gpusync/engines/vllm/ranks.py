"""The ranks as the API server sees them: every worker of every data-parallel engine, by the engine's own calls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gpusync.endpoint import Outcome, Status, Update, error_from_dict
from gpusync.engines.gauges import Gauges
from gpusync.engines.vllm.refusals import find_server_refusal
from gpusync.engines.vllm.settings import Settings
from gpusync.errors import RefusedError

LOG = logging.getLogger(__name__)

EXTENSION = "gpusync.engines.vllm.WorkerExtension"
POLL_S = 0.05
# An engine that is busy longer is not asked again: nothing is known of it, and it is not ready.
LOOK_S = 5.0
Told = Mapping[str, Any]


class Ranks:
    """An endpoint's `Backend`. `told` holds what each rank said of itself last, by engine; a version counts where all
    of them have it. `off`: why gpusync is off on this server."""

    def __init__(self, get_client: Callable[[], Any], *, settings: Settings, gauges: Gauges | None = None) -> None:
        self._get_client, self._settings, self._gauges = get_client, settings, gauges
        self._starting: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[Sequence[Sequence[Told]]] | None = None
        self._is_fenced = False
        self.told: Sequence[Sequence[Told]] = ()
        self.off: str | None = "the engine has not started"

    async def start(self) -> None:
        """Once: find out whether gpusync can work here, on every rank."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def prepare(self, update: Update) -> Outcome:
        argument = {
            "version": update.target_version,
            "source_dir": str(update.source_dir),
            "local_checkpoint_dir": str(update.local_checkpoint_dir),
        }
        told = await self._call("prepare", argument)
        _check(told)
        while True:
            told = await self._call("poll")
            if not any(each.get("running") for each in told):
                break
            await asyncio.sleep(POLL_S)
        _check(told)
        await self._lift_fence()
        return self._outcome(told)

    async def commit(self, version: int) -> Outcome:
        status = await self.refresh()
        if status.prepared != version:
            if status.live == version:
                return Outcome(message=f"version {version} is live already", status=status)
            raise RefusedError("not what is prepared", version=version, expected=status.prepared)
        async with self._paused() as client:
            told = await self._call("commit", {"version": version})
            self._check_engines(told)
            await client.reset_prefix_cache(reset_running_requests=self._settings.pause == "keep")
            await client.reset_mm_cache()
            await client.reset_encoder_cache()
            await client.update_weight_version(str(version))
        return self._outcome(told)

    async def abort(self, version: int | None) -> Outcome:
        told = await self._call("abort", {"version": version})
        _check(told)
        return self._outcome(told)

    async def forget(self, reason: str, *, asleep: bool | None = None) -> Outcome:
        """Something else is about to change the weights, or to take their memory away, or has given it back."""
        told = await self._call("forget", {"reason": reason, "asleep": asleep})
        _check(told)
        return self._outcome(told)

    def status(self) -> Status:
        every = [each for engine in self.told for each in engine]
        doubts = [each["in_doubt"] for each in every if each.get("in_doubt") is not None]
        return Status(
            live=_common(every, "live"),
            durable=_common([each for each in every if each.get("durable") is not None], "durable"),
            prepared=_common(every, "prepared"),
            commit_path=_common(every, "commit_path"),
            in_doubt=doubts[0] if doubts else None,
        )

    def metrics(self) -> str:
        return ""

    async def refresh(self) -> Status:
        """Ask the ranks where they are."""
        if self.off is None:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.ensure_future(self._ask("look", {}))
            try:
                self.told = await asyncio.wait_for(asyncio.shield(self._looking), LOOK_S)
            # Whatever a dead engine's client raises: nothing is known of its ranks then, and they are not ready.
            except Exception as error:  # noqa: BLE001
                LOG.warning("gpusync: the ranks have not answered: %s: %s", type(error).__name__, error)
                self.told = ()
        return self._gauged()

    async def _start(self) -> None:
        client = self._get_client()
        self.off = find_server_refusal(client.vllm_config, extension=EXTENSION)
        if self.off is None and not hasattr(client.engine_core, "call_utility_all_async"):
            self.off = "this engine's client cannot ask every data-parallel engine"
        if self.off is None:
            every = await self._call("start")
            reasons = (each.get("off") or (None if each["success"] else each["message"]) for each in every)
            self.off = next((str(reason) for reason in reasons if reason is not None), None)
        LOG.info("gpusync is on" if self.off is None else f"gpusync is off: {self.off}")
        self._gauged()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[Any]:
        """The engine at rest. If it was so before, and not by us, it stays so; and if it is not known what it would
        serve, it is not woken."""
        client = self._get_client()
        is_paused = await client.is_paused()
        is_theirs = is_paused and not self._is_fenced
        if not is_paused:
            await client.pause_generation(mode=self._settings.pause, clear_cache=False)
        try:
            yield client
        finally:
            self._is_fenced = not is_theirs and not self._is_certain
            if not is_theirs and not self._is_fenced:
                await client.resume_generation()

    @property
    def _is_certain(self) -> bool:
        """All ranks know what is live, and it is the same."""
        status = self.status()
        return status.live is not None and status.in_doubt is None

    async def _lift_fence(self) -> None:
        if self._is_fenced and self._is_certain:
            self._is_fenced = False
            await self._get_client().resume_generation()

    async def _call(self, call: str, argument: Mapping[str, object] | None = None) -> list[Told]:
        """The answers of all ranks, which are what is known of them from now on."""
        if self.off is not None and call != "start":
            raise RefusedError("gpusync is off on this server", found=self.off)
        engines = await self._ask(call, argument or {})
        if not any(each.get("running") for engine in engines for each in engine):
            self.told = engines
            self._gauged()
        return [each for engine in engines for each in engine]

    async def _ask(self, call: str, argument: Mapping[str, object]) -> Sequence[Sequence[Told]]:
        core = self._get_client().engine_core
        told = json.dumps(argument)
        engines = await core.call_utility_all_async("collective_rpc", "gpusync", None, (call, told), None)
        return [[json.loads(each) for each in engine] for engine in engines]

    def _outcome(self, every: Sequence[Told]) -> Outcome:
        report: Mapping[str, object] = every[0].get("report", {})
        return Outcome(message=str(every[0]["message"]), status=self.status(), report=report)

    def _check_engines(self, every: Sequence[Told]) -> None:
        """As `_check`. Where some data-parallel engines have succeeded, it says which version each serves now."""
        engines = [all(each["success"] for each in engine) for engine in self.told]
        if any(engines) and not all(engines):
            failed = next(each for each in every if not each["success"])
            lives = {number: engine[0].get("live") for number, engine in enumerate(self.told)}
            raise RefusedError(f"data-parallel engines differ now: {failed['message']}", found=f"live versions {lives}")
        _check(every)

    def _gauged(self) -> Status:
        status = self.status()
        if self._gauges is not None:
            self._gauges.set(status, is_on=self.off is None)
        return status


def _common(every: Sequence[Told], name: str) -> Any:
    values = [each.get(name) for each in every]
    return values[0] if values and all(value == values[0] for value in values) else None


def _check(every: Sequence[Told]) -> None:
    """Raises what the first failed rank tells of."""
    failed = next((each for each in every if not each["success"]), None)
    if failed is not None:
        raise error_from_dict(failed["error"])
