"""`gpusync doctor --engine URL`: what an engine says of gpusync in it, and why it says nothing."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request

from gpusync.errors import GpusyncError

ROUTE = "/weights/engine"
AGENT_ROUTE = "/weights/version"
TIMEOUT_S = 10.0
Facts = dict[str, object]


def read_engine(url: str) -> Facts:
    """Facts for a person. Raises GpusyncError if nothing that speaks HTTP answers."""
    status, told = _get(url.rstrip("/") + ROUTE)
    if status == 404:
        agent_status, agent = _get(url.rstrip("/") + AGENT_ROUTE)
        if agent_status == 200 and "live" in agent:
            return {"url": url, "gpusync": "this is `gpusync serve`", "live": _shown(agent["live"])}
    facts: Facts = {"url": url, **_verdict(status, told)}
    groups = told.get("groups")
    groups = groups if isinstance(groups, list) else []
    for number, group in enumerate(groups):
        prefix = "" if len(groups) == 1 else f"group_{number}_"
        facts |= {f"{prefix}{name}": _shown(value) for name, value in group.items() if value not in (None, {}, [])}
    return facts


def _verdict(status: int, told: dict[str, object]) -> Facts:
    if status == 404:
        return {
            "gpusync": "not in this server",
            "look_at": "is gpusync installed where the engine runs (`pip show gpusync`)? does SGLANG_PLUGINS, if it is "
            "set, name gpusync? is GPUSYNC_DISABLE set? the engine's log says `Loaded plugin gpusync`, or why not",
        }
    if status in (401, 403):
        return {"gpusync": "not told: the engine wants a token", "look_at": "GPUSYNC_TOKEN, or the engine's API key"}
    return {"gpusync": str(told.get("message", f"HTTP status {status}"))}


def _get(url: str) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url)
    token = os.environ.get("GPUSYNC_TOKEN")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return reply.status, _as_object(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, _as_object(error.read())
    except (OSError, ValueError) as error:
        raise GpusyncError("no engine answers", path=url, found=error) from error


def _as_object(body: bytes) -> dict[str, object]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shown(value: object) -> object:
    return value if isinstance(value, bool | int | str) else json.dumps(value)
