"""`gpusync doctor --engine`: what an engine says of gpusync, and what to look at where it says nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpusync.cli.commands import run


@contextmanager
def engine(status: int, told: object, *, agent: object = None) -> Iterator[str]:
    """An engine that gives one answer to everything, an agent that is one to `/weights/version`; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            is_agent = agent is not None and self.path == "/weights/version"
            body = json.dumps(agent if is_agent else told).encode()
            self.send_response(200 if is_agent else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


seen: list[tuple[str, str | None]] = []


def ask(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(["doctor", "--engine", url, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["engine"]
    return found


def test_an_engine_tells_what_it_patches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSYNC_TOKEN", "secret")
    group = {"engine": "sglang", "base_dir": "/base", "bytes_by_class": {"direct": 7}, "off": None, "live": 3}
    with engine(200, {"success": True, "message": "gpusync is on", "groups": [group]}) as url:
        told = ask(url, capsys)
    assert (told["gpusync"], told["base_dir"], told["live"]) == ("gpusync is on", "/base", 3)
    assert told["bytes_by_class"] == '{"direct": 7}'
    assert "off" not in told
    assert seen[-1] == ("/weights/engine", "Bearer secret")


def test_groups_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with engine(200, {"success": True, "message": "on", "groups": [{"live": 1}, {"live": 2}]}) as url:
        told = ask(url, capsys)
    assert (told["group_0_live"], told["group_1_live"]) == (1, 2)


@pytest.mark.parametrize(
    ("status", "told", "verdict", "look_at"),
    [
        (404, {"detail": "Not Found"}, "not in this server", "pip show gpusync"),
        (401, {}, "wants a token", "GPUSYNC_TOKEN"),
        (200, {"message": "gpusync is off: LoRA"}, "off: LoRA", ""),
        (500, [], "HTTP status 500", ""),
    ],
)
def test_what_is_wrong_is_explained(
    status: int, told: object, verdict: str, look_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(status, told) as url:
        found = ask(url, capsys)
    assert verdict in str(found["gpusync"])
    assert look_at in str(found.get("look_at", ""))


def test_an_agent_of_our_own_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with engine(404, {}, agent={"live": 7}) as url:
        told = ask(url, capsys)
    assert (told["gpusync"], told["live"]) == ("this is `gpusync serve`", 7)


def test_no_engine_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with engine(200, {}) as url:
        pass
    assert run(["doctor", "--engine", url]) == 1
    assert "no engine answers" in capsys.readouterr().err
