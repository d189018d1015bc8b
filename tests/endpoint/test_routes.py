"""Every route as a caller sees it: statuses, and what the JSON says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpusync.endpoint import Roots, Routes, Service
from gpusync.endpoint.asgi import AsgiApp
from gpusync.endpoint.routes import MAX_BODY_BYTES
from gpusync.errors import DigestMismatchError, PeerFailedError
from support.asgi import call
from support.backends import FakeBackend

Scenario = Callable[[AsgiApp, FakeBackend], Awaitable[None]]


def serve(tmp_path: Path, scenario: Scenario, *, token: str | None = None, timeout_s: float = 20) -> None:
    async def run() -> None:
        backend = FakeBackend()
        roots = Roots(source=(tmp_path / "shared",), local=(tmp_path / "nvme",))
        app = AsgiApp(Routes(Service(backend, roots=roots, timeout_s=timeout_s), token=token))
        await asyncio.wait_for(scenario(app, backend), 30)

    asyncio.run(run())


@pytest.fixture
def pull(tmp_path: Path) -> dict[str, object]:
    """What slime's trainer sends."""
    return {
        "local_checkpoint_dir": str(tmp_path / "nvme" / "weights"),
        "source_dir": str(tmp_path / "shared" / "run"),
        "target_version": 1,
    }


def test_pull_weights_prepares_and_touches_nothing_live(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        answer = await call(app, "POST", "/pull_weights", pull)
        assert answer.status == 200
        assert answer.told["success"] is True
        assert (answer.told["live"], answer.told["prepared"], answer.told["commit_path"]) == (0, 1, "in place")
        assert answer.told["report"] == {"commit_path": "in place"}
        assert backend.updates[0].source_dir == tmp_path / "shared" / "run"

    serve(tmp_path, scenario)


def test_prepare_commit_and_abort_have_routes_of_their_own(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        await call(app, "POST", "/prepare_weights", pull | {"commit": True})
        assert (backend.live, backend.prepared) == (0, 1)
        await call(app, "POST", "/abort_weights", {"target_version": 1})
        assert backend.prepared is None
        await call(app, "POST", "/prepare_weights", pull)
        answer = await call(app, "POST", "/commit_weights", {"target_version": 1})
        assert (answer.status, answer.told["live"]) == (200, 1)

    serve(tmp_path, scenario)


def test_commit_true_does_both(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        answer = await call(app, "POST", "/pull_weights", pull | {"commit": True})
        assert (answer.status, answer.told["live"], answer.told["prepared"]) == (200, 1, None)

    serve(tmp_path, scenario)


def test_an_error_is_a_400_with_its_text_and_fields(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        error = DigestMismatchError("wrong", path="/s/weight_v000001", version=1, tensor="a", expected="00", found="11")
        backend.failures["prepare"] = error
        answer = await call(app, "POST", "/pull_weights", pull)
        assert answer.status == 400
        assert answer.told["success"] is False
        assert answer.told["message"] == str(error)
        facts = answer.told["error"]
        assert facts["type"] == ["DigestMismatchError", "GpusyncError"]
        assert [facts[name] for name in ("path", "version", "tensor", "expected", "found")] == [
            "/s/weight_v000001", 1, "a", "00", "11",
        ]  # fmt: skip
        backend.failures["prepare"] = PeerFailedError("failed", ranks={3: "out of memory"})
        answer = await call(app, "POST", "/pull_weights", pull)
        assert answer.told["error"]["ranks"] == {"3": "out of memory"}

    serve(tmp_path, scenario)


def test_a_bug_is_a_500_in_one_line_and_the_next_request_is_served(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        backend.failures["prepare"] = ValueError("two\nlines")
        answer = await call(app, "POST", "/pull_weights", pull)
        assert (answer.status, answer.told["success"]) == (500, False)
        assert answer.told["message"] == "ValueError: two lines"
        backend.failures.clear()
        assert (await call(app, "POST", "/pull_weights", pull)).status == 200

    serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("source_dir", "/etc"),
        ("source_dir", "{tmp}/shared/../secret"),
        ("source_dir", "{tmp}/nvme/weights"),
        ("local_checkpoint_dir", "{tmp}/shared/run"),
        ("local_checkpoint_dir", "{tmp}/nvme/link"),
        ("local_checkpoint_dir", "weights"),
    ],
)
def test_a_directory_outside_the_roots_never_reaches_the_ranks(tmp_path, pull, field, path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "link").symlink_to("/etc")

    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        answer = await call(app, "POST", "/pull_weights", pull | {field: path.format(tmp=tmp_path)})
        assert answer.status == 400
        assert answer.told["error"]["type"][0] == "ForbiddenPathError"
        assert field in answer.told["message"]
        assert backend.calls == []

    serve(tmp_path, scenario)


def test_the_ranks_get_the_directory_a_link_leads_to(tmp_path, pull) -> None:
    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "shared" / "latest").symlink_to("run")

    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        await call(app, "POST", "/pull_weights", pull | {"source_dir": str(tmp_path / "shared" / "latest")})
        assert backend.updates[0].source_dir == tmp_path / "shared" / "run"

    serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("POST", "/pull_weights", b"{", 400),
        ("POST", "/pull_weights", b'{"target_version": "1"}', 400),
        ("POST", "/pull_weights", b'{"target_version": 1}', 400),  # no directory, and the endpoint has none
        ("POST", "/commit_weights", b"{}", 400),
        ("POST", "/commit_weights", b'{"target_version": 9}', 400),
        ("GET", "/pull_weights", b"", 405),
        ("POST", "/weights/version", b"", 405),
        ("GET", "/", b"", 404),
        ("GET", "/weights/../metrics", b"", 404),
        ("GET", "/weights/ready?version=x", b"", 400),
        ("GET", "/weights/ready?version=-1", b"", 400),
        ("GET", "/weights/ready?version=1&version=2", b"", 400),
        ("GET", "/weights/ready?version=", b"", 400),
        ("GET", "/weights/ready?version=\u0661", b"", 400),
        ("GET", "/weights/ready?" + "&".join(["a=1"] * 100), b"", 400),
        ("GET", "/weights/ready", b"", 200),
        ("GET", "/weights/ready?version=0", b"", 200),
        ("GET", "/weights/ready?version=1", b"", 503),
    ],
)
def test_statuses(tmp_path, method, target, body, status) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        answer = await call(app, method, target, body)
        assert answer.status == status
        assert answer.told["success"] is (status == 200)
        assert answer.told["message"]
        assert "\n" not in answer.told["message"]

    serve(tmp_path, scenario)


def test_a_body_over_the_limit_is_refused_before_it_is_read_to_its_end(tmp_path) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        pieces = [b" " * 16384] * 1000
        answer = await call(app, "POST", "/pull_weights", pieces)
        assert answer.status == 413
        assert answer.messages_read == MAX_BODY_BYTES // 16384 + 1

    serve(tmp_path, scenario)


def test_version_tells_live_durable_prepared_and_the_commit_path(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        await call(app, "POST", "/pull_weights", pull)
        told = (await call(app, "GET", "/weights/version")).told
        assert {name: told[name] for name in ("live", "durable", "prepared", "commit_path", "ready", "running")} == {
            "live": 0, "durable": 0, "prepared": 1, "commit_path": "in place", "ready": True, "running": None,
        }  # fmt: skip

    serve(tmp_path, scenario)


def test_version_is_told_while_an_update_runs(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        backend.gate.clear()
        pulling = asyncio.ensure_future(call(app, "POST", "/pull_weights", pull))
        await asyncio.sleep(0.2)
        told = (await call(app, "GET", "/weights/version")).told
        assert (told["live"], told["running"]) == (0, "preparing version 1")
        backend.gate.set()
        await pulling

    serve(tmp_path, scenario)


def test_metrics_are_prometheus_text_and_leave_out_what_is_unknown(tmp_path, pull) -> None:
    async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
        await call(app, "POST", "/pull_weights", pull | {"commit": True})
        answer = await call(app, "GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.body.decode().splitlines()
        assert "gpusync_live_version 1" in lines
        assert "gpusync_ready 1" in lines
        assert 'gpusync_requests_total{kind="pull",result="done"} 1' in lines
        assert "fake_metric 1" in lines
        assert not any(line.startswith("gpusync_prepared_version ") for line in lines)
        backend.live = None
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert "gpusync_ready 0" in text
        assert "\ngpusync_live_version " not in text

    serve(tmp_path, scenario)


class TestToken:
    @pytest.mark.parametrize(
        "headers",
        [{}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}, {"Authorization": "Basic secret"}],
    )
    @pytest.mark.parametrize("target", ["/pull_weights", "/metrics", "/nothing"])
    def test_without_it_nothing_is_told_or_done(self, tmp_path, pull, headers, target) -> None:
        async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
            answer = await call(app, "POST", target, pull, headers=headers)
            assert (answer.status, answer.told["success"]) == (401, False)
            assert "secret" not in answer.body.decode()
            assert backend.calls == []

        serve(tmp_path, scenario, token="secret")

    def test_with_it_all_is_as_without(self, tmp_path, pull) -> None:
        async def scenario(app: AsgiApp, backend: FakeBackend) -> None:
            answer = await call(app, "POST", "/pull_weights", pull, headers={"Authorization": "Bearer secret"})
            assert answer.status == 200

        serve(tmp_path, scenario, token="secret")
