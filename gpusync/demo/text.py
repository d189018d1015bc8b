"""Real text for the demo, found on every machine: the documentation strings of Python's own built-in types."""

from __future__ import annotations

import builtins
import collections
import functools
import itertools
import math
import re
import sys
import time
import types
from collections.abc import Iterator

import numpy as np

from gpusync.demo.model import Tokens

_MODULES = (builtins, collections, functools, itertools, math, re, sys, time)
_WORDS = re.compile(r"\w+|[^\w\s]")
_RARE = 0


def documentation() -> str:
    """All docstrings of the modules above, each once, in a fixed order for one Python version."""
    return "\n".join(dict.fromkeys(text for module in _MODULES for text in _docstrings(module)))


def tokenize(text: str, vocabulary: int) -> Tokens:
    """Words and signs as ids by falling frequency; what does not fit the vocabulary is id 0."""
    words = _WORDS.findall(text.lower())
    frequent = collections.Counter(words).most_common(vocabulary - 1)
    ids = {word: number for number, (word, _) in enumerate(frequent, start=_RARE + 1)}
    return np.array([ids.get(word, _RARE) for word in words], np.int64)


def batches(tokens: Tokens, *, batch: int, length: int, rng: np.random.Generator) -> Iterator[Tokens]:
    """Endless [batch, length] samples at random places. `tokens` is longer than `length`."""
    while True:
        starts = rng.integers(0, tokens.size - length, batch)
        yield np.stack([tokens[start : start + length] for start in starts])


def _docstrings(module: types.ModuleType) -> Iterator[str]:
    for name in sorted(vars(module)):
        member = vars(module)[name]
        parts = [vars(member)[key] for key in sorted(vars(member))] if isinstance(member, type) else []
        for part in [member, *parts]:
            text = getattr(part, "__doc__", None)
            if isinstance(text, str):
                yield text
