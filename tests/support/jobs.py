"""What a helper process is given to do in tests."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from gpusync.errors import PayloadError


@dataclass(frozen=True, slots=True)
class Sum:
    numbers: tuple[int, ...]

    def run(self) -> int:
        print("this is no answer")
        os.write(1, b"and this is none")
        return sum(self.numbers)


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float

    def run(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Fail:
    """Raises; `is_portable`: an error that can be pickled."""

    is_portable: bool

    def run(self) -> None:
        if self.is_portable:
            raise PayloadError("no frame", tensor="w", version=3, expected=1, found=2)

        class Odd(Exception):
            pass

        raise Odd("of a class that nobody else knows")


@dataclass(frozen=True, slots=True)
class HasTorch:
    def run(self) -> bool:
        return "torch" in sys.modules


@dataclass(frozen=True, slots=True)
class Die:
    def run(self) -> None:
        os._exit(7)


@dataclass(frozen=True, slots=True)
class Leave:
    def run(self) -> None:
        sys.exit(3)
