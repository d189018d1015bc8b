"""What vLLM's workers are extended by: the calls that the API server makes of every rank.

Arguments and answers are JSON. No call raises: an executor stops at the first rank that has failed, and gives the other
ranks' answers to the next call, whatever it asks for.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from gpusync.endpoint.wire import error_as_dict
from gpusync.engines.vllm.follower import Follower
from gpusync.engines.vllm.layout import resolve_base, trace_model
from gpusync.engines.vllm.packing import Packing
from gpusync.engines.vllm.rank import Rank
from gpusync.engines.vllm.refusals import find_refusal
from gpusync.engines.vllm.settings import Settings, read_settings
from gpusync.errors import GpusyncError, RefusedError
from gpusync.stream import read_checkpoint
from gpusync.verdict import open_group

LOG = logging.getLogger(__name__)

CALLS = ("prepare", "poll", "commit", "abort", "forget", "look")


class WorkerExtension:
    """A base class that vLLM adds to its worker's: `--worker-extension-cls gpusync.engines.vllm.WorkerExtension`."""

    def gpusync(self, call: str, argument: str) -> str:
        """One of CALLS, or `start`, which comes first and finds out whether gpusync can work here."""
        try:
            if call == "start":
                self._gpusync_rank = start_rank(self)
                return json.dumps(self._gpusync_rank.look({}))
            if call not in CALLS:
                raise RefusedError("no such call", found=call)
            return json.dumps(getattr(self._gpusync_rank, call)(json.loads(argument)))
        # The rank boundary: nothing may be raised here.
        except Exception as error:  # noqa: BLE001
            facts = error_as_dict(error)
            return json.dumps({"success": False, "message": facts["message"], "error": facts})


def start_rank(worker: Any) -> Rank:
    """Never raises. Whatever is wrong on one rank turns gpusync off on all, with the reason, and the server serves."""
    settings, follower, group, problem = Settings(), None, None, None
    try:
        group = _tensor_parallel_group()
        settings = read_settings()
        follower = _follow(worker, group, settings)
    # The rank boundary: the engine starts without gpusync, and says why.
    except Exception as error:  # noqa: BLE001
        problem = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
    try:
        # Only for the hello: which directory is local is not known yet.
        open_group(group, local_checkpoint_dir="/", timeout_s=settings.handshake_timeout_s, problem=problem).close()
    except GpusyncError as error:
        LOG.warning("gpusync is off, and this server serves without it: %s", error)
        follower, problem = None, str(error)
    facts = {"engine": "vllm"}
    if follower is not None:
        facts |= follower.facts
        LOG.info("gpusync follows %s: %s", facts["base_dir"], facts["bytes_by_class"])
    return Rank(worker, follower=follower, off=problem, facts=facts)


def _tensor_parallel_group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().cpu_group
    return group if torch.distributed.get_world_size(group) > 1 else None


def _follow(worker: Any, group: Any, settings: Settings) -> Follower:
    """Traces the layout. Whatever vLLM's model classes raise comes through."""
    reason = find_refusal(worker.vllm_config)
    if reason is not None:
        raise RefusedError(reason)
    base_dir = resolve_base(worker.vllm_config)
    layout = trace_model(worker, read_checkpoint(base_dir, follow_links=True).tensors)
    packing = Packing(layout, worker.get_model(), base_dir)
    return Follower(
        worker.get_model(),
        packing.layout,
        base_dir=base_dir,
        group=group,
        settings=settings,
        reload=lambda directory: worker.reload_weights(weights_path=str(directory)),
        find_omission=packing.find_omission,
    )
