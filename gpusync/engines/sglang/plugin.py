"""The entry point: which functions of sglang are hooked, and with what."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

LOG = logging.getLogger(__name__)

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ANSWER = f"{SCHEDULER}.process_input_requests"
RELOAD = f"{UPDATER}.update_weights_from_disk"
TOKENIZER_RELOAD = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk"
HTTP_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
# Whatever else changes weights, or takes their memory away.
OTHER_UPDATES = (
    "begin_weight_update",
    "end_weight_update",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "release_memory_occupation",
    "resume_memory_occupation",
)


def register() -> None:
    """Called by sglang in each of its processes, before it makes anything. Hooks that are missing turn gpusync off."""
    if os.environ.get("GPUSYNC_DISABLE", "") not in ("", "0"):
        LOG.info("gpusync is off: GPUSYNC_DISABLE is set")
        return
    from sglang.srt.managers import tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from gpusync.engines.sglang import messages
    from gpusync.engines.sglang.server import mount

    messages.define_messages()
    tokenizer_control_mixin._COMMUNICATOR_SPECS += [
        ("gpusync_update", messages.message_type("GpusyncUpdateReqOutput")),
        ("gpusync_look", messages.message_type("GpusyncLookReqOutput")),
    ]
    HookRegistry.register(HTTP_SERVER, mount, HookType.BEFORE)
    HookRegistry.register(TOKENIZER_RELOAD, _reload_in_turn, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.init_request_dispatcher", _start_rank, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.get_init_info", _tell_whether_off, HookType.AFTER)
    HookRegistry.register(ANSWER, _answer_requests, HookType.AFTER)
    HookRegistry.register(RELOAD, _reload, HookType.AROUND)
    for name in OTHER_UPDATES:
        HookRegistry.register(f"{UPDATER}.{name}", _other_update(name), HookType.AROUND)


def _start_rank(result: object, scheduler: Any, *_: object) -> None:
    from sglang.utils import TypeBasedDispatcher

    from gpusync.engines.sglang import messages
    from gpusync.engines.sglang.start import start_rank

    rank = start_rank(scheduler, not_hooked=_not_hooked())
    scheduler.gpusync_rank = rank
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [
            (messages.message_type("GpusyncUpdateReqInput"), rank.update),
            (messages.message_type("GpusyncLookReqInput"), rank.look),
        ]
    )


def _tell_whether_off(result: dict[str, Any], scheduler: Any, *_: object) -> None:
    """To the HTTP process, with what sglang tells it: it must not ask ranks that would not understand."""
    rank = getattr(scheduler, "gpusync_rank", None)
    result["gpusync_off"] = "the plugin did not start" if rank is None else rank.off


async def _reload_in_turn(original: Callable[..., Awaitable[Any]], manager: Any, *args: Any, **options: Any) -> Any:
    from gpusync.engines.sglang.ranks import turn_of

    async with turn_of(manager):
        return await original(manager, *args, **options)


def _answer_requests(result: object, scheduler: Any, *_: object) -> None:
    rank = getattr(scheduler, "gpusync_rank", None)
    if rank is not None:
        rank.answer(scheduler.send_control_output)


def _reload(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    rank = getattr(updater.scheduler, "gpusync_rank", None)
    return original(updater, request) if rank is None else rank.reload(lambda: original(updater, request), request)


def _other_update(name: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], updater: Any, *args: Any, **options: Any) -> Any:
        rank = getattr(updater.scheduler, "gpusync_rank", None)
        if rank is not None:
            rank.make_way(name)
        return original(updater, *args, **options)

    return around


def _not_hooked() -> list[str]:
    """Functions without whose hooks wrong weights could be served, and that are not hooked in this process: sglang only
    logs what it could not hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    needed = [ANSWER, RELOAD, *(f"{UPDATER}.{name}" for name in OTHER_UPDATES)]
    return [target for target in needed if target not in HookRegistry._patched]
