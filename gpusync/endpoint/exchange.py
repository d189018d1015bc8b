"""One HTTP exchange with time-outs, tried again while nothing but the connection failed. The standard library only.

Trying again is safe by construction: every request names the state that it wants, and a server that has it already says
so. What a server answered is final, but for 502, 503 and 504, which come from what stands before it.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpusync.endpoint.errors import EndpointError, UnreachableError

CONNECT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
BUSY_STATUSES = (502, 503, 504)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go. `retry_for_s` bounds how long failed connections are tried again, `timeout_s` everything."""

    url: str
    token: str | None
    timeout_s: float
    retry_for_s: float
    sleep: Callable[[float], None] = time.sleep

    def exchange(self, method: str, target: str, told: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        """Status and body of the answer. Raises UnreachableError when none came in time."""
        began, delay = time.monotonic(), _FIRST_DELAY_S
        while True:
            left = self.timeout_s - (time.monotonic() - began)
            try:
                status, body = self._exchange_once(method, target, told, left)
                if status not in BUSY_STATUSES or target.startswith("/weights/ready"):
                    return status, body
                problem: object = f"status {status}"
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            passed = time.monotonic() - began
            if passed + delay > min(self.retry_for_s, self.timeout_s):
                raise UnreachableError(
                    f"no answer to {method} {target} after {passed:.3g} s", path=self.url, found=problem
                )
            self.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def _exchange_once(
        self, method: str, target: str, told: Mapping[str, object] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(place.hostname), place.port, timeout=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            body = None if told is None else json.dumps(told).encode()
            connection.request(method, place.path.rstrip("/") + target, body=body, headers=self._headers(body))
            answer = connection.getresponse()
            promised = min(answer.length or 0, MAX_ANSWER_BYTES)  # 0: read to the end of the connection
            raw = answer.read(MAX_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if len(raw) < promised:
            raise http.client.IncompleteRead(raw, promised - len(raw))
        if len(raw) > MAX_ANSWER_BYTES:
            raise EndpointError("the answer is too long", path=self.url, expected=f"at most {MAX_ANSWER_BYTES} bytes")
        return answer.status, raw

    def _headers(self, body: bytes | None) -> dict[str, str]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises EndpointError for what is no address of a server."""
    try:
        place = urlsplit(url)
        whole = place.scheme in ("http", "https") and bool(place.hostname) and (place.port or 1) > 0
    except ValueError:
        whole = False
    if not whole or place.query or place.fragment:
        raise EndpointError("not the address of an endpoint", expected="http://host:port", found=url)
    return url.rstrip("/")
