"""An endpoint, for Python: what it answers as data, what it refuses as the error that it was."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpusync.endpoint.errors import EndpointError, RemoteError, UpdateTimeoutError
from gpusync.endpoint.exchange import Server, check_url
from gpusync.endpoint.wire import error_from_dict

TIMEOUT_S = 1800.0
RETRY_FOR_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine says about its weights. `report` is that of the update that was asked for."""

    message: str
    live: int | None
    durable: int | None
    prepared: int | None
    commit_path: str | None
    in_doubt: str | None
    report: Mapping[str, object] = field(default_factory=dict)


class Client:
    """The endpoint at `url`. From any thread; each call is a connection of its own.

    A call is tried again for `retry_for` seconds while only the connection fails, and ends after `timeout` seconds with
    an UnreachableError. Whatever the endpoint refuses is raised as the error that it was there.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = TIMEOUT_S, retry_for: float = RETRY_FOR_S
    ) -> None:
        self.url = check_url(url)
        self._server = Server(url=self.url, token=token, timeout_s=timeout, retry_for_s=retry_for)

    def pull(
        self,
        target_version: int,
        *,
        source_dir: str | None = None,
        local_checkpoint_dir: str | None = None,
        commit: bool = False,
    ) -> Answer:
        """Prepare a version, and make it live too with `commit`. Directories default to the endpoint's own."""
        told = {
            "target_version": target_version,
            "source_dir": source_dir,
            "local_checkpoint_dir": local_checkpoint_dir,
            "commit": commit,
        }
        return self._post("/pull_weights", told)

    def prepare(
        self, target_version: int, *, source_dir: str | None = None, local_checkpoint_dir: str | None = None
    ) -> Answer:
        return self.pull(target_version, source_dir=source_dir, local_checkpoint_dir=local_checkpoint_dir)

    def commit(self, target_version: int) -> Answer:
        """Make live what is prepared. Live already: nothing is done, and that is fine."""
        return self._post("/commit_weights", {"target_version": target_version})

    def abort(self, target_version: int | None = None) -> Answer:
        """Drop what is prepared, if it is this version or none is named."""
        return self._post("/abort_weights", {"target_version": target_version})

    def version(self) -> Answer:
        return _answer(self._object("GET", "/weights/version"))

    def is_ready(self, version: int | None = None) -> bool:
        """Whether `version` or a later one is live and known (None: any)."""
        target = "/weights/ready" if version is None else f"/weights/ready?version={version}"
        status, body = self._server.exchange("GET", target)
        if status not in (200, 503):
            self._raise(status, body)
        return status == 200

    def wait_until_ready(self, version: int | None = None, *, timeout: float, poll: float = 0.2) -> None:
        """Raises UpdateTimeoutError when it is not so in time, UnreachableError when nobody answers."""
        deadline = time.monotonic() + timeout
        while not self.is_ready(version):
            if time.monotonic() > deadline:
                what = "any version" if version is None else f"version {version}"
                raise UpdateTimeoutError(f"not ready for {what} after {timeout:.3g} s", path=self.url)
            time.sleep(poll)

    def metrics(self) -> str:
        status, body = self._server.exchange("GET", "/metrics")
        if status != 200:
            self._raise(status, body)
        return body.decode()

    def get(self, target: str) -> dict[str, object]:
        """Any other route of the engine that answers a JSON object."""
        return self._object("GET", target)

    def post(self, target: str, told: Mapping[str, object]) -> dict[str, object]:
        """Any other route of the engine that answers a JSON object with `success`."""
        return self._object("POST", target, told)

    def _post(self, target: str, told: Mapping[str, object]) -> Answer:
        return _answer(self._object("POST", target, {key: value for key, value in told.items() if value is not None}))

    def _object(self, method: str, target: str, told: Mapping[str, object] | None = None) -> dict[str, object]:
        status, body = self._server.exchange(method, target, told)
        if status != 200:
            self._raise(status, body)
        found = _parsed(body)
        if found is None:
            raise EndpointError("the answer is no JSON object", path=self.url, found=_start(body))
        return found

    def _raise(self, status: int, body: bytes) -> None:
        found = _parsed(body) or {}
        facts = found.get("error")
        if isinstance(facts, dict):
            raise error_from_dict(facts)
        told = found.get("message") or _start(body)  # a server that is not ours, say slime's receiver
        raise RemoteError("the endpoint refused", path=self.url, found=f"status {status}: {told}")


def _parsed(body: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _start(body: bytes) -> str:
    return body[:200].decode("utf-8", errors="replace")


def _answer(told: Mapping[str, object]) -> Answer:
    report = told.get("report")
    return Answer(
        message=str(told.get("message", "")),
        live=_number(told.get("live")),
        durable=_number(told.get("durable")),
        prepared=_number(told.get("prepared")),
        commit_path=_text(told.get("commit_path")),
        in_doubt=_text(told.get("in_doubt")),
        report=report if isinstance(report, dict) else {},
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
