"""One rank of a synchronisation: the ranks beside it, the model it serves, and the host that it may lead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpusync.mirror.look import Sources
from gpusync.progress import Progress
from gpusync.store.digests import digest_over
from gpusync.sync.host import Host
from gpusync.sync.live import LiveModel
from gpusync.sync.team import Team


@dataclass(slots=True, kw_only=True)
class Rank:
    """`host` is None on ranks that lead none. `open_host` makes it, on one that does. `reload(directory)` is the
    engine's ordinary reload."""

    team: Team
    live: LiveModel
    sources: Sources
    local_checkpoint_dir: Path
    open_host: Callable[[], Host]
    reload: Callable[[Path], object]
    staging_bytes: int
    verifies_after: bool
    progress: Progress | None = None
    host: Host | None = None

    def attach(self) -> None:
        """Find out where everything is, and which version is live."""
        self.team.step("opening the local checkpoint", self._hold_files, "mirror")
        self.team.step("tracing the layout", self.live.trace, "trace")
        self.identify()

    def attach_again(self) -> None:
        """The same after the engine has reloaded."""
        self.team.step("opening the local checkpoint", self._hold_files, "hold")
        self.team.step("binding the layout", self.live.bind, "bind")
        self.identify()

    def identify(self) -> None:
        """The version that is live on all ranks, and the store of this one, judged by that version's bytes."""
        found = self.team.step("identifying the live version", self.live.identify, "identify")
        version = found if all(each == found for each in self.team.gather(found)) else None
        held = self.team.step("judging the layout", lambda: self._judge(version), "judge")
        everyone = self.team.gather(held)
        names = sorted({name for each in everyone for name in each})
        self.live.store.held_by_any = {name: max(each.get(name, 0) for each in everyone) for name in names}
        self.let_go()

    def flush(self, timeout_s: float) -> None:
        """Wait until the local files hold all that is durable."""
        if self.host is not None:
            self.host.flush(timeout_s)

    def let_go(self) -> None:
        """What was held for a version is free, on the leader of a host."""
        if self.host is not None:
            self.host.let_go()

    def _judge(self, version: int | None) -> dict[str, int]:
        team = self.team
        return self.live.judge(
            version,
            lambda shards: digest_over(team.group, shards, timeout_s=team.timeout_s),
            staging_bytes=self.staging_bytes,
        )

    def _hold_files(self) -> None:
        if not self.team.group.is_leader:
            return
        if self.host is None:
            self.host = self.open_host()
        self.host.hold(0)  # the files are about to be read
