"""Where ranks play their scenes: a process that has imported torch once and forks a rank for every part.

Run as a program, with the name of a module of scenes, it reads one request per line, {"scene", "size", "parts",
"place", "timeout_s"}, and answers each with what every part has seen. Importing torch is what takes time, so that many
short plays are cheap.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KILLED = "killed"


@dataclass(frozen=True)
class Part:
    """One process of a scene. Parts beyond `size` are understudies, who stand in for a rank that was killed."""

    number: int
    size: int
    place: Path
    port: int

    @property
    def rank(self) -> int:
        return self.number

    def signal(self, name: str) -> None:
        (self.place / name).touch()

    def await_signal(self, name: str, timeout_s: float = 20) -> None:
        end = time.monotonic() + timeout_s
        while not (self.place / name).exists():
            if time.monotonic() > end:
                raise TimeoutError(name)
            time.sleep(0.005)

    def meet(self, name: str, numbers: list[int] | None = None) -> None:
        """Wait for other parts, by other means than the ones under test."""
        self.signal(f"{name}.{self.number}")
        for number in range(self.size) if numbers is None else numbers:
            self.await_signal(f"{name}.{number}")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Company:
    """The process that forks, seen from a test."""

    def __init__(self, scenes: str = "verdict.scenes") -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "kernels")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "error", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        command = [sys.executable, "-m", "verdict.stage", scenes]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def play(self, scene: str, *, size: int, place: Path, parts: int | None = None, timeout_s: float = 40) -> list[Any]:
        """What each part has seen; KILLED for one that died. Fails if a part fails or does not come to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"scene": scene, "size": size, "parts": parts or size, "place": str(place), "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        wrong = [seen for seen in answer if isinstance(seen, dict) and "traceback" in seen]
        assert not wrong, "\n".join(str(seen["traceback"]) for seen in wrong)
        return list(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


def serve(scenes: dict[str, Callable[[Part], Any]]) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        place = Path(request["place"])
        port = free_port()
        children = []
        for number in range(request["parts"]):
            part = Part(number=number, size=request["size"], place=place, port=port)
            child = os.fork()
            if child == 0:
                play_part(scenes[request["scene"]], part, request["timeout_s"])
            children.append(child)
        print(json.dumps(collect(children, place, request["timeout_s"])), flush=True)


def play_part(scene: Callable[[Part], Any], part: Part, timeout_s: float) -> None:
    try:
        faulthandler.dump_traceback_later(timeout_s - 5)
        (part.place / f"pid.{part.number}").write_text(str(os.getpid()))
        try:
            seen = scene(part)
        except BaseException:  # noqa: BLE001
            seen = {"traceback": f"part {part.number}: {traceback.format_exc()}"}
        done = part.place / f"seen.{part.number}.tmp"
        done.write_text(json.dumps(seen))
        done.rename(done.with_suffix(".json"))
    finally:
        # What is left of threads that are stuck on purpose must not hold up the test.
        os._exit(0)


def collect(children: list[int], place: Path, timeout_s: float) -> list[Any]:
    end = time.monotonic() + timeout_s
    running = dict(enumerate(children))
    late = []
    while running:
        for number, child in list(running.items()):
            seen = place / f"seen.{number}.json"
            if time.monotonic() > end:
                late.append(number)
                os.kill(child, signal.SIGKILL)
            # A child that was killed stays a zombie while its scene lasts, as it would under most parents.
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or seen.exists():
                del running[number]
        time.sleep(0.01)
    for child in children:
        os.waitpid(child, 0)
    return [see(place / f"seen.{number}.json", number, number in late) for number in range(len(children))]


def see(path: Path, number: int, is_late: bool) -> Any:
    if path.exists():
        return json.loads(path.read_text())
    return {"traceback": f"part {number} did not come to its end"} if is_late else KILLED


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """Stands between a rank and the store, and can cut the connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = free_port()
        self._sockets: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.heal()

    def heal(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and refuse new ones until `heal`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # Only a shutdown wakes the thread that accepts, and only then is the port closed.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            # Cut, by either side or by the test.
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]).SCENES)
