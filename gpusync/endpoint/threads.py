"""Blocking work beside an event loop, in daemon threads: one that is stuck in a dead filesystem holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def call_in_thread(work: Callable[[], T], *, name: str) -> T:
    """The result of `work`, or what it raised. Cancelled, it leaves the thread behind.

    `asyncio.to_thread` will not do: its pool is bounded, and the interpreter waits for its threads at exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # nobody waits any more
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits
            _tell(loop, tell, None, error)
        else:
            _tell(loop, tell, result, None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def _tell(
    loop: asyncio.AbstractEventLoop,
    tell: Callable[[T | None, BaseException | None], None],
    result: T | None,
    error: BaseException | None,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell, result, error)
