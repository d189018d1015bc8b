"""Thread pools that run their work at once, in the thread that submits it.

A dispatch mode belongs to one thread. Engines' loaders hand copies to a thread pool; there they would not be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def inline_thread_pools() -> Iterator[None]:
    """While it is open, what this thread submits to any ThreadPoolExecutor runs before `submit` returns. Other threads'
    pools work as ever. Not to be open in two threads at once.
    """
    tracing, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def submit_inline(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != tracing:
            return submit(self, fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        # As a pool does: what the work raises is for whoever asks for the result.
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future

    ThreadPoolExecutor.submit = submit_inline  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
