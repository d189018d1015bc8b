"""A worker process: takes calls from the agent, answers each with a verdict, and never outlives it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusync.endpoint import error_as_dict
from gpusync.engines.agent.settings import AgentSettings, Place
from gpusync.errors import GpusyncError
from gpusync.verdict.members import Members

if TYPE_CHECKING:
    from gpusync.engines.agent.follower import Follower

LOG = logging.getLogger(__name__)


def run_worker(settings: AgentSettings, rank: int, members: Members | None, channel: Connection) -> None:
    """The body of the process. Ends with a "stop", or with the agent, whatever it is waiting for then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the agent decides
    threading.Thread(target=_end_with_the_agent, name="gpusync-parent", daemon=True).start()
    import torch  # the agent, which starts these processes, does without

    from gpusync.engines.agent.follower import Follower

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.tp))
    follower: Follower | None = None
    while True:
        call = json.loads(channel.recv_bytes())
        if call["what"] == "stop":
            break
        try:
            if follower is None:
                follower = Follower(settings, rank=rank, members=members)
            told = {"result": _do(follower, call), "status": follower.status()}
        # A worker that ended here would take the others with it; the agent gets the error, with its class.
        except Exception as error:
            if not isinstance(error, GpusyncError):
                LOG.exception("worker %d: %s failed", rank, call["what"])
            status = None if follower is None else follower.status()
            told = {"error": error_as_dict(error), "status": status}
        channel.send_bytes(json.dumps(told).encode())
    if follower is not None:
        follower.close()


def _do(follower: Follower, call: dict[str, Any]) -> object:
    place = None
    if "source_dir" in call:
        place = Place(source_dir=Path(call["source_dir"]), local_checkpoint_dir=Path(call["local_checkpoint_dir"]))
    match call["what"], place:
        case "recover", Place():
            follower.recover(place)
            return None
        case "load", _:
            follower.load(None if place is None else place.local_checkpoint_dir)
            return None
        case "attach", Place():
            follower.attach(place)
            return None
        case "prepare", _:
            return follower.prepare(call["version"])
        case "commit", _:
            return follower.commit(call["version"])
        case "abort", _:
            follower.abort()
            return None
        case "digests", _:
            return follower.digests()
    raise GpusyncError("no such call", found=call["what"])


def _end_with_the_agent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # a collective, or a dead filesystem, may hold the main thread
