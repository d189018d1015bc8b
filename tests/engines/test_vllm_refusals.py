"""Why updates in place are refused: of settings and states, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpusync.engines.vllm.ranks import EXTENSION
from gpusync.engines.vllm.refusals import find_refusal, find_server_refusal, is_asleep
from gpusync.engines.vllm.settings import read_settings
from gpusync.errors import RefusedError


def _config(**settings: Any) -> Any:
    """A VllmConfig in which these dotted names are set."""
    root = SimpleNamespace()
    for path, value in settings.items():
        *parents, name = path.split("__")
        at = root
        for parent in parents:
            if not hasattr(at, parent):
                setattr(at, parent, SimpleNamespace())
            at = getattr(at, parent)
        setattr(at, name, value)
    return root


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel_config__pipeline_parallel_size": 1, "parallel_config__enable_eplb": False, "lora_config": None},
        {"parallel_config__enable_expert_parallel": True, "parallel_config__data_parallel_size": 1},
        {"offload_config__uva__cpu_offload_gb": 0, "offload_config__prefetch__offload_group_size": 0},
        {"load_config__load_format": "auto", "model_config__model_weights": ""},
        {"speculative_config__method": "ngram"},
    ],
)
def test_an_ordinary_server_is_followed(settings: dict[str, Any]) -> None:
    assert find_refusal(_config(**settings)) is None


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context"),
        ({"parallel_config__enable_expert_parallel": True, "parallel_config__data_parallel_size": 2}, "expert"),
        ({"parallel_config__enable_eplb": True}, "EPLB"),
        ({"parallel_config__enable_elastic_ep": True}, "elastic"),
        ({"lora_config": object()}, "LoRA"),
        ({"offload_config__uva__cpu_offload_gb": 4}, "offload"),
        ({"cache_config__cpu_offload_gb": 4}, "offload"),
        ({"offload_config__prefetch__offload_group_size": 2}, "offload"),
        ({"load_config__load_format": "dummy"}, "dummy"),
        ({"model_config__model_weights": "s3://bucket"}, "object store"),
        ({"speculative_config__method": "eagle"}, "eagle"),
    ],
)
def test_a_setting_that_forbids_updates_is_named(settings: dict[str, Any], word: str) -> None:
    assert word in str(find_refusal(_config(**settings)))


def test_workers_without_the_extension_and_several_servers_are_named() -> None:
    parallel = {"parallel_config__worker_extension_cls": EXTENSION, "parallel_config___api_process_count": 1}
    assert find_server_refusal(_config(**parallel), extension=EXTENSION) is None
    parallel["parallel_config___api_process_count"] = 2
    assert "--api-server-count" in str(find_server_refusal(_config(**parallel), extension=EXTENSION))
    assert EXTENSION in str(find_server_refusal(_config(), extension=EXTENSION))


@pytest.mark.parametrize(("state", "asleep"), [("RUNNING", False), ("SUSPENDED", True), ("RESUMING", True)])
def test_a_suspended_worker_is_asleep(state: str, asleep: bool) -> None:
    assert is_asleep(SimpleNamespace(_sleep_mode_backend=SimpleNamespace(state=lambda: state))) is asleep


def test_a_worker_that_never_slept_is_awake() -> None:
    assert not is_asleep(SimpleNamespace(_sleep_mode_backend=None))
    assert not is_asleep(SimpleNamespace())


@pytest.mark.parametrize(
    ("name", "value"), [("TIMEOUT_S", "soon"), ("SOURCE_ROOTS", "streams"), ("PAUSE", "never"), ("LOCAL_ROOTS", "a:/b")]
)
def test_a_variable_that_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(RefusedError, match=f"GPUSYNC_{name}"):
        read_settings({f"GPUSYNC_{name}": value})
