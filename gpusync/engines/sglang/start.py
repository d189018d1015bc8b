"""A rank's start: whether gpusync can work on this server, agreed on by all ranks of the group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from gpusync.engines.settings import Settings, read_settings
from gpusync.engines.sglang.follower import Follower
from gpusync.engines.sglang.rank import Rank
from gpusync.engines.sglang.refusals import find_refusal, read_setting
from gpusync.errors import GpusyncError, RefusedError
from gpusync.verdict import open_group

LOG = logging.getLogger(__name__)


def start_rank(scheduler: Any, *, not_hooked: Sequence[str]) -> Rank:
    """Never raises. Whatever is wrong on one rank turns gpusync off on all, with the reason, and the server serves."""
    group = scheduler.weight_updater.tp_cpu_group
    group = group if torch.distributed.get_world_size(group) > 1 else None
    settings, follower, problem = Settings(), None, None
    try:
        settings = read_settings()
        follower = _follow(scheduler, group, settings, not_hooked=not_hooked)
    # The rank boundary: the engine starts without gpusync, and says why.
    except Exception as error:  # noqa: BLE001
        problem = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
    try:
        # Only for the hello: which directory is local is not known yet.
        open_group(group, local_checkpoint_dir="/", timeout_s=settings.handshake_timeout_s, problem=problem).close()
    except GpusyncError as error:
        LOG.warning("gpusync is off, and this server serves without it: %s", error)
        follower, problem = None, str(error)
    facts = {"engine": "sglang"}
    if follower is not None:
        facts |= follower.facts
        LOG.info("gpusync follows %s: %s", facts["base_dir"], facts["bytes_by_class"])
    return Rank(scheduler, follower=follower, off=problem, facts=facts, timeout_s=settings.timeout_s)


def _follow(scheduler: Any, group: Any, settings: Settings, *, not_hooked: Sequence[str]) -> Follower:
    updater = scheduler.weight_updater
    if not_hooked:
        raise RefusedError("this sglang has other functions than those that are hooked", found=", ".join(not_hooked))
    reason = find_refusal(scheduler, read_setting(scheduler)) or _cache_error(updater)
    if reason is not None:
        raise RefusedError(reason)
    return Follower.of(updater._select_runners("all"), group=group, settings=settings)


def _cache_error(updater: Any) -> str | None:
    """sglang's own word on caches that no update in place keeps right."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    say = weight_updater._unsupported_derived_weight_cache_error
    reasons = (say(runner.model) for _, runner in updater._select_runners("all"))
    return next((str(reason) for reason in reasons if reason is not None), None)
