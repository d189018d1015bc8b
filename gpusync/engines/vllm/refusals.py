"""What of vLLM's configuration and state forbids updates in place. Looks, and says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LOAD_FORMATS = ("auto", "hf", "safetensors")
# Drafts that have no weights.
WEIGHTLESS_DRAFTS = ("ngram", "ngram_gpu", "suffix")


def find_refusal(config: Any) -> str | None:
    """Why gpusync has to stay off under this VllmConfig, None if it need not. What a release does not have is not set
    in it."""
    return next(_refusals(config), None)


def find_server_refusal(config: Any, *, extension: str) -> str | None:
    """Why gpusync has to stay off, as far as the API server knows before any worker is asked: one that lacks the
    extension would raise, and its engine would answer the next call with what is left over."""
    found = _get(config, "parallel_config.worker_extension_cls")
    if found != extension:
        return f"the workers lack its extension (--worker-extension-cls {extension})"
    if (_get(config, "parallel_config._api_process_count") or 1) > 1:
        return "several API servers: each would run updates of its own (--api-server-count 1)"
    return None


def _refusals(config: Any) -> Iterator[str]:
    def read(path: str) -> Any:
        return _get(config, path)

    if (read("parallel_config.pipeline_parallel_size") or 1) > 1:
        yield "pipeline parallelism: no group of ranks holds all weights"
    if (read("parallel_config.prefill_context_parallel_size") or 1) > 1:
        yield "prefill context parallelism: not tried"
    if read("parallel_config.enable_expert_parallel") and (read("parallel_config.data_parallel_size") or 1) > 1:
        yield "expert parallelism over data-parallel engines: no group of ranks holds all weights"
    if read("parallel_config.enable_eplb") or read("parallel_config.enable_elastic_ep"):
        yield "EPLB or elastic expert parallelism: experts move between ranks"
    if read("lora_config") is not None:
        yield "LoRA: its wrappers rename params"
    if (read("offload_config.uva.cpu_offload_gb") or 0) > 0 or (read("cache_config.cpu_offload_gb") or 0) > 0:
        yield "CPU offload: params move between host and device"
    if (read("offload_config.prefetch.offload_group_size") or 0) > 0:
        yield "CPU offload: params move between host and device"
    load_format = read("load_config.load_format")
    load_format = getattr(load_format, "value", load_format)
    if load_format not in (None, *LOAD_FORMATS):
        yield f"--load-format {load_format}: only checkpoints in safetensors are followed"
    if read("model_config.model_weights"):
        yield "the weights come from an object store, not from a directory"
    if read("speculative_config") is not None and read("speculative_config.method") not in WEIGHTLESS_DRAFTS:
        yield f"speculative decoding with {read('speculative_config.method')}: draft models are not followed"


def _get(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def is_asleep(worker: Any) -> bool:
    """Whether the worker's memory is suspended. After a wake-up of a part it does not know which: see `Rank.sleep`."""
    backend = getattr(worker, "_sleep_mode_backend", None)
    return backend is not None and backend.state() != "RUNNING"
