"""What of sglang's configuration and state forbids updates in place. Pure: looks, and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Read = Callable[[str], Any]


def find_refusal(scheduler: Any, read: Read) -> str | None:
    """Why gpusync has to stay off on this server, None if it need not. `read` gives a setting in effect, None where
    this sglang has no such setting."""
    return next(_refusals(scheduler, read), None)


def _refusals(scheduler: Any, read: Read) -> Iterator[str]:
    if (read("pp_size") or 1) > 1:
        yield "pipeline parallelism: a stage works off a request before the next one gets it"
    if (read("tokenizer_worker_num") or 1) > 1:
        yield "several tokenizer workers: they do not get a plugin's routes (--tokenizer-worker-num 1)"
    if getattr(scheduler, "rust_server", None) is not None:
        yield "SGLANG_RUST_SERVER: that server does not get a plugin's routes"
    if read("enable_dp_attention_local_control_broadcast"):
        yield "--enable-dp-attention-local-control-broadcast: ranks of one group get requests at different times"
    if (read("weight_cache_mode") or "off") != "off":
        yield "--weight-cache-mode: the weights are shared with other engines"
    if (read("cpu_offload_gb") or 0) > 0 or (read("offload_group_size") or -1) > 0:
        yield "CPU offload: params move between host and device"
    if read("enable_eplb") or read("elastic_ep_backend"):
        yield "EPLB or elastic expert parallelism: experts move between ranks"
    if read("enable_lora") or read("lora_paths"):
        yield "LoRA: its wrappers rename params"
    if read("is_startup_weight_load_overlap"):
        yield "the weights are loaded while the server starts"
    if read("load_format") not in (None, "auto", "safetensors"):
        yield f"--load-format {read('load_format')}: only checkpoints in safetensors are followed"


def find_obstacle(updater: Any) -> str | None:
    """Why the weights cannot be touched now."""
    if "weights" in updater.offload_tags:
        return "the weights' memory is released"
    if getattr(updater, "_session", None) is not None:
        return "a weight update session is open (/begin_weight_update)"
    return None


def read_setting(scheduler: Any) -> Read:
    """Settings as they are in effect after sglang has resolved them."""

    def read(name: str) -> Any:
        try:
            from sglang.srt.runtime_context import get_context

            return get_context().config_leaf(name)
        # Which settings there are, and where, changes between releases.
        except (ImportError, AttributeError, ValueError):
            return getattr(scheduler.server_args, name, None)

    return read
