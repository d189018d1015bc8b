"""Why updates in place are refused: of settings and states, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpusync.engines.settings import read_settings
from gpusync.engines.sglang.refusals import find_obstacle, find_refusal
from gpusync.errors import RefusedError


def _refusal(server: str | None = None, **settings: Any) -> str | None:
    return find_refusal(SimpleNamespace(rust_server=server), settings.get)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pp_size": 1, "tokenizer_worker_num": 1, "weight_cache_mode": "off", "load_format": "auto"},
        {"cpu_offload_gb": 0, "offload_group_size": -1, "enable_eplb": False, "elastic_ep_backend": None},
        {"enable_lora": None, "lora_paths": [], "load_format": "safetensors"},
    ],
)
def test_an_ordinary_server_is_followed(settings: dict[str, Any]) -> None:
    assert _refusal(**settings) is None


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("pp_size", 2, "pipeline"),
        ("tokenizer_worker_num", 2, "tokenizer"),
        ("enable_dp_attention_local_control_broadcast", True, "different times"),
        ("weight_cache_mode", "client", "shared"),
        ("cpu_offload_gb", 4, "offload"),
        ("offload_group_size", 2, "offload"),
        ("enable_eplb", True, "EPLB"),
        ("elastic_ep_backend", "mooncake", "elastic"),
        ("enable_lora", True, "LoRA"),
        ("lora_paths", ["a"], "LoRA"),
        ("is_startup_weight_load_overlap", True, "starts"),
        ("load_format", "dummy", "dummy"),
    ],
)
def test_a_setting_that_forbids_updates_is_named(setting: str, value: object, word: str) -> None:
    assert word in str(_refusal(**{setting: value}))


def test_the_rust_server_is_named() -> None:
    assert "SGLANG_RUST_SERVER" in str(_refusal(server="there"))


def test_released_weights_and_open_sessions_are_obstacles() -> None:
    assert find_obstacle(SimpleNamespace(offload_tags=set(), _session=None)) is None
    assert "released" in str(find_obstacle(SimpleNamespace(offload_tags={"weights"}, _session=None)))
    assert find_obstacle(SimpleNamespace(offload_tags={"kv_cache"}, _session=None)) is None
    assert "session" in str(find_obstacle(SimpleNamespace(offload_tags=set(), _session=object())))


def test_the_environment_names_roots_times_and_a_token() -> None:
    told = read_settings(
        {
            "GPUSYNC_SOURCE_ROOTS": "/shared:/more",
            "GPUSYNC_LOCAL_ROOTS": "/nvme",
            "GPUSYNC_TOKEN": "secret",
            "GPUSYNC_TIMEOUT_S": "30",
            "GPUSYNC_PRE_READ_HOOK": "volumes:reload",
        }
    )
    assert [str(root) for root in told.source_roots] == ["/shared", "/more"]
    assert [str(root) for root in told.local_roots] == ["/nvme"]
    assert (told.token, told.timeout_s, told.pre_read_hook) == ("secret", 30.0, "volumes:reload")
    assert "secret" not in repr(told)
    assert [str(root) for root in read_settings({}).source_roots] == ["/"]


@pytest.mark.parametrize(("name", "value"), [("GPUSYNC_TIMEOUT_S", "soon"), ("GPUSYNC_LOCAL_ROOTS", "nvme")])
def test_a_variable_that_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(RefusedError, match=name) as caught:
        read_settings({name: value})
    assert caught.value.found == value
