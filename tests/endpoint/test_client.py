"""The client: answers as data, refusals as the errors they were, and connections that fail."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpusync.endpoint import RemoteError, UnauthorizedError, UnreachableError, UpdateTimeoutError
from gpusync.endpoint.client import Client
from gpusync.endpoint.errors import EndpointError
from gpusync.errors import DigestMismatchError, GpusyncError, PeerFailedError, RefusedError
from support.backends import FakeBackend
from support.served import answering, reply, served

OK = b'{"success": true, "message": "done", "live": 1}'


def test_an_update_from_end_to_end(tmp_path: Path) -> None:
    with served(tmp_path, FakeBackend()) as url:
        client = Client(url, timeout=20)
        assert client.version().live == 0
        answer = client.prepare(1)
        assert (answer.live, answer.prepared, answer.commit_path) == (0, 1, "in place")
        assert answer.report == {"commit_path": "in place"}
        assert not client.is_ready(1)
        assert client.commit(1).live == 1
        assert client.is_ready(1)
        assert client.pull(2, commit=True).live == 2
        client.prepare(3)
        assert client.abort().prepared is None
        assert "gpusync_live_version 2" in client.metrics()


def test_fifty_callers_at_once_are_one_update_and_each_gets_its_answer(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.prepare_s = 2.0
    with served(tmp_path, backend) as url, ThreadPoolExecutor(50) as pool:
        client = Client(url, timeout=30)
        answers = list(pool.map(lambda _: client.prepare(1), range(50)))
    assert [answer.prepared for answer in answers] == [1] * 50
    assert backend.calls == [("prepare", 1)]


@pytest.mark.parametrize(
    "error",
    [
        DigestMismatchError("wrong", path="/s", version=1, tensor="a", expected="00", found="11"),
        PeerFailedError("failed", ranks={3: "out of memory"}),
        RefusedError("asleep"),
    ],
)
def test_a_refusal_is_raised_as_the_error_that_it_was(tmp_path: Path, error: GpusyncError) -> None:
    backend = FakeBackend()
    backend.failures["prepare"] = error
    with served(tmp_path, backend) as url, pytest.raises(type(error)) as caught:
        Client(url, timeout=20).prepare(1)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


def test_a_token_is_sent(tmp_path: Path) -> None:
    with served(tmp_path, FakeBackend(), token="secret") as url:
        assert Client(url, token="secret", timeout=20).version().live == 0
        with pytest.raises(UnauthorizedError):
            Client(url, timeout=20).version()


def test_a_bug_in_the_server_is_an_error_of_ours(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.failures["prepare"] = ValueError("no")
    with served(tmp_path, backend) as url, pytest.raises(RemoteError, match="ValueError: no"):
        Client(url, timeout=20).prepare(1)


class TestFlakyServers:
    def test_a_connection_that_breaks_is_tried_again(self) -> None:
        def answer(handler, n: int) -> None:
            if n == 0:
                handler.connection.shutdown(socket.SHUT_RDWR)
            elif n == 1:
                handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
                handler.connection.shutdown(socket.SHUT_RDWR)
            elif n == 2:
                reply(handler, 503, b"busy")
            else:
                reply(handler, 200, OK)

        with answering(answer) as url:
            assert Client(url, timeout=20).prepare(1).live == 1

    def test_an_answer_that_is_lost_is_asked_for_again_and_the_update_is_done_once(self, tmp_path: Path) -> None:
        backend = FakeBackend()
        with served(tmp_path, backend) as url:
            target = Client(url, timeout=20)

            def relay(handler, n: int) -> None:
                answer = target.pull(1, commit=True)
                if n == 0:
                    handler.connection.shutdown(socket.SHUT_RDWR)
                else:
                    reply(handler, 200, b'{"success": true, "live": %d}' % answer.live)

            with answering(relay) as flaky:
                assert Client(flaky, timeout=20).pull(1, commit=True).live == 1
        assert backend.live == 1

    def test_a_refusal_is_final(self) -> None:
        asked = []

        def answer(handler, n: int) -> None:
            asked.append(n)
            reply(handler, 400, b'{"success": false, "message": "no seed"}')

        with answering(answer) as url, pytest.raises(RemoteError, match="status 400: no seed"):
            Client(url, timeout=20).prepare(1)
        assert asked == [0]

    def test_nobody_there_is_an_error_with_the_address(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(UnreachableError) as caught:
            Client(url, timeout=20, retry_for=0.5).prepare(1)
        assert caught.value.path == url
        assert "refused" in str(caught.value)

    def test_a_server_that_never_answers_is_given_up(self) -> None:
        release = threading.Event()
        began = time.monotonic()
        with answering(lambda handler, n: release.wait(20)) as url:
            with pytest.raises(UnreachableError):
                Client(url, timeout=1).prepare(1)
            assert time.monotonic() - began < 5
            release.set()

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"null"])
    def test_an_answer_that_is_no_object_is_refused(self, body: bytes) -> None:
        with answering(lambda handler, n: reply(handler, 200, body)) as url, pytest.raises(EndpointError):
            Client(url, timeout=20).version()


def test_waiting_until_ready_ends(tmp_path: Path) -> None:
    backend = FakeBackend()
    with served(tmp_path, backend) as url:
        client = Client(url, timeout=20)
        with pytest.raises(UpdateTimeoutError, match="not ready for version 1"):
            client.wait_until_ready(1, timeout=0.3)
        client.pull(1, commit=True)
        client.wait_until_ready(1, timeout=5)


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://host:x", "http://host:99999", "http://h?a=1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(EndpointError):
        Client(url)
