"""Several engines brought to a version as one: none commits before all of them have prepared.

An engine that fails later than that, in its commit, is fenced: it is named, with the version that it has, and requests
should not go to it. A fenced engine holds nobody up; it is asked again at every pull, and is back once it has
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpusync.endpoint.client import TIMEOUT_S, Answer, Client
from gpusync.endpoint.errors import EndpointError
from gpusync.errors import GpusyncError

SHORT_TIMEOUT_S = 60.0  # for what an engine answers at once


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine after a pull. `live` is None when it is unknown there, or nobody answered. `error` is what it failed
    with; `prepared`, `committed` and `fenced` say how far it came."""

    url: str
    live: int | None
    prepared: bool
    committed: bool
    fenced: bool
    error: GpusyncError | None = None
    answer: Answer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    version: int
    engines: tuple[EngineReport, ...]

    @property
    def versions(self) -> dict[str, int | None]:
        """Every engine's live version."""
        return {engine.url: engine.live for engine in self.engines}

    @property
    def fenced(self) -> dict[str, str]:
        """Engines that requests should not go to, and why."""
        return {engine.url: str(engine.error) for engine in self.engines if engine.fenced}


class FleetError(EndpointError):
    """The version is not live on all engines. `report` tells of each of them."""

    def __init__(self, what: str, *, report: FleetReport) -> None:
        self.report = report
        told = "; ".join(_told(engine) for engine in report.engines)
        super().__init__(f"{what} ({told})", version=report.version)


class Fleet:
    """Engines at `urls`, each with its endpoint. Directories default to each endpoint's own.

    `fenced` maps an engine to why requests should not go to it. One thread at a time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        source_dir: str | None = None,
        local_checkpoint_dir: str | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        retry_for: float = 30.0,
    ) -> None:
        clients = [Client(url, token=token, timeout=timeout, retry_for=retry_for) for url in urls]
        if not clients:
            raise EndpointError("a fleet needs an engine")
        self._clients = {client.url: client for client in clients}
        short = min(timeout, SHORT_TIMEOUT_S)
        self._asking = {url: Client(url, token=token, timeout=short, retry_for=0) for url in self._clients}
        self._source_dir, self._local = source_dir, local_checkpoint_dir
        self.fenced: dict[str, str] = {}

    def fence(self, url: str, reason: str) -> None:
        """Go on without an engine until it has committed a version together with the others."""
        if url.rstrip("/") not in self._clients:
            raise EndpointError("no engine of this fleet", path=url)
        self.fenced[url.rstrip("/")] = reason

    def pull(self, version: int) -> FleetReport:
        """Bring every engine to `version`. FleetError: what each engine has now is in its report.

        If one that is not fenced cannot prepare, none commits, and all drop what they prepared.
        """
        prepared = self._on_all(self._clients, lambda client: self._prepare(client, version))
        failed = _errors(prepared)
        if set(failed) - set(self.fenced) or len(failed) == len(self._clients):
            self._on_all(self._asking, lambda client: client.abort(version))
            what = f"version {version} was prepared on {len(prepared) - len(failed)} of {len(prepared)} engines"
            raise FleetError(f"{what}, and committed on none", report=self._report(version, prepared, committed={}))
        ready = {url: client for url, client in self._clients.items() if url not in failed}
        committed = self._on_all(ready, lambda client: client.commit(version))
        for url in committed:
            self.fenced.pop(url, None)
        self.fenced |= {url: str(error) for url, error in _errors(committed).items()}
        report = self._report(version, prepared, committed)
        if _errors(committed):
            raise FleetError(f"version {version} was prepared everywhere and not committed everywhere", report=report)
        return report

    def versions(self) -> dict[str, int | None]:
        """What every engine serves now; None: unknown there, or no answer."""
        told = self._on_all(self._asking, lambda client: client.version())
        return {url: each.live if isinstance(each, Answer) else None for url, each in told.items()}

    def _prepare(self, client: Client, version: int) -> Answer:
        return client.prepare(version, source_dir=self._source_dir, local_checkpoint_dir=self._local)

    def _report(
        self,
        version: int,
        prepared: Mapping[str, Answer | GpusyncError],
        committed: Mapping[str, Answer | GpusyncError],
    ) -> FleetReport:
        last = {**prepared, **committed}
        asked = self.versions() if _errors(last) else {}
        engines = []
        for url, each in last.items():
            answer, error = (each, None) if isinstance(each, Answer) else (None, each)
            live = None if answer is None else answer.live
            engines.append(
                EngineReport(
                    url=url,
                    live=asked.get(url, live),
                    prepared=isinstance(prepared[url], Answer),
                    committed=isinstance(committed.get(url), Answer),
                    fenced=url in self.fenced,
                    error=error,
                    answer=answer,
                )
            )
        return FleetReport(version=version, engines=tuple(engines))

    def _on_all(
        self, clients: Mapping[str, Client], ask: Callable[[Client], Answer]
    ) -> dict[str, Answer | GpusyncError]:
        """Every engine's answer, or what it failed with; all are asked at once."""

        def guarded(client: Client) -> Answer | GpusyncError:
            try:
                return ask(client)
            except GpusyncError as error:
                return error

        with ThreadPoolExecutor(max_workers=len(clients), thread_name_prefix="gpusync-fleet") as pool:
            return dict(zip(clients, pool.map(guarded, clients.values()), strict=True))


def _errors(answers: Mapping[str, Answer | GpusyncError]) -> dict[str, GpusyncError]:
    return {url: each for url, each in answers.items() if isinstance(each, GpusyncError)}


def _told(engine: EngineReport) -> str:
    live = "unknown" if engine.live is None else str(engine.live)
    text = f"{engine.url}: live {live}"
    if engine.fenced:
        text += ", fenced"
    return text if engine.error is None else f"{text}, {engine.error}"
