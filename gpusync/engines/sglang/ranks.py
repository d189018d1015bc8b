"""The ranks as the HTTP process sees them: over sglang's own sockets to its schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpusync.endpoint import Outcome, Status, Update, error_from_dict
from gpusync.engines.gauges import Gauges
from gpusync.engines.sglang import messages
from gpusync.errors import RefusedError

Told = Mapping[str, Any]
# A loop that is busy longer, say with a reload, is not asked again: nothing is known of it, and it is not ready.
LOOK_S = 5.0
FLUSH_S = 10.0


def turn_of(manager: Any) -> asyncio.Lock:
    """Held while the ranks prepare: sglang's reload waits for it here, and not in the schedulers' loops."""
    turn: asyncio.Lock = vars(manager).setdefault("gpusync_turn", asyncio.Lock())
    return turn


class Ranks:
    """An endpoint's `Backend`. `told` holds what each group of ranks (one, but for data parallelism) said of itself
    last; a version counts where all of them have it. `get_off` is what the first of them said as it started: where
    gpusync is off nothing is sent, for ranks without the plugin could not read it.
    """

    def __init__(
        self, get_manager: Callable[[], Any], *, get_off: Callable[[], str | None], gauges: Gauges | None = None
    ) -> None:
        self._get_manager, self._get_off, self._gauges = get_manager, get_off, gauges
        self._looking: asyncio.Task[Sequence[Told]] | None = None
        self.told: Sequence[Told] = ()

    @property
    def off(self) -> str | None:
        """Why gpusync is off on this server."""
        return next((str(each["off"]) for each in self.told if each.get("off") is not None), None)

    async def prepare(self, update: Update) -> Outcome:
        return await self._update(
            "prepare",
            version=update.target_version,
            source_dir=str(update.source_dir),
            local_checkpoint_dir=str(update.local_checkpoint_dir),
        )

    async def commit(self, version: int) -> Outcome:
        """By sglang's own reload, which every rank turns into the commit: it waits for requests that run, unless they
        are paused, and flushes the cache."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        status = await self.refresh()
        if status.prepared != version:
            if status.live == version:
                return Outcome(message=f"version {version} is live already", status=status)
            raise RefusedError("not what is prepared", version=version, expected=status.prepared)
        directory = str(self.told[0]["local_checkpoint_dir"])
        request = UpdateWeightFromDiskReqInput(model_path=directory, weight_version=str(version))
        manager = self._get_manager()
        success, message, _ = await manager.update_weights_from_disk(request, None)
        status = await self.refresh()
        if not success and status.live == version:
            # A request that has just been answered still counts as running.
            success = (await manager.flush_cache(timeout_s=FLUSH_S)).success
        if not success:
            raise RefusedError(message, version=version, found=f"live version {status.live}")
        return Outcome(message=f"version {version} is live", status=status, report=self._report())

    async def abort(self, version: int | None) -> Outcome:
        return await self._update("abort", version=version)

    def status(self) -> Status:
        live, durable, prepared = (self._common(name) for name in ("live", "durable", "prepared"))
        doubts = [each["in_doubt"] for each in self.told if each.get("in_doubt") is not None]
        return Status(
            live=live,
            durable=durable,
            prepared=prepared,
            commit_path=self._common("commit_path"),
            in_doubt=doubts[0] if doubts else None,
        )

    def metrics(self) -> str:
        return ""

    async def refresh(self) -> Status:
        """Ask the ranks where they are."""
        off = self._get_off()
        self.told = [{"engine": "sglang", "off": off}] if off is not None else await self._look_in_time()
        status = self.status()
        if self._gauges is not None:
            self._gauges.set(status, is_on=self.off is None)
        return status

    async def _look_in_time(self) -> Sequence[Told]:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        try:
            return await asyncio.wait_for(asyncio.shield(self._looking), LOOK_S)
        except asyncio.TimeoutError:
            return ()

    async def _look(self) -> Sequence[Told]:
        manager = self._get_manager()
        manager.auto_create_handle_loop()
        answers = await manager.gpusync_look_communicator(messages.build("GpusyncLookReqInput"))
        return [messages.parse_told(answer) for answer in answers]

    async def _update(self, action: str, **argument: object) -> Outcome:
        if self._get_off() is not None:
            raise RefusedError("gpusync is off on this server", found=self._get_off())
        manager = self._get_manager()
        manager.auto_create_handle_loop()
        request = messages.build("GpusyncUpdateReqInput", action=action, argument=argument)
        async with turn_of(manager):
            answers = await manager.gpusync_update_communicator(request)
        self.told = [messages.parse_told(answer) for answer in answers]
        failed = next((each for each in self.told if not each["success"]), None)
        if failed is not None:
            raise error_from_dict(failed["error"])
        return Outcome(message=str(self.told[0]["message"]), status=self.status(), report=self._report())

    def _report(self) -> Mapping[str, object]:
        report: Mapping[str, object] = self.told[0].get("report", {}) if self.told else {}
        return report

    def _common(self, name: str) -> Any:
        values = [each.get(name) for each in self.told]
        return values[0] if values and all(value == values[0] for value in values) else None
