"""JSON from hostile files: one meaning per text, bounded memory, and errors of the caller's class.

Stricter than `json.loads`: UTF-8 only, no key twice, no NaN or infinity, no lone surrogate, a bound on the number of
values.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from gpusync.errors import StreamError, Where
from gpusync.stream.limits import MAX_JSON_NODES

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, *, what: str, where: Where, error: type[StreamError]) -> object:
    """The value `raw` holds, or an `error` at `where`; `what` names the text ("index", "shard header")."""
    nodes = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if nodes > MAX_JSON_NODES:
        raise error(f"{what} holds too many values", where=where, expected=f"at most {MAX_JSON_NODES}", found=nodes)

    def refuse_constant(text: str) -> NoReturn:
        raise error(f"{what} holds a number that JSON does not have", where=where, found=text)

    def parse_float(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            refuse_constant(text if len(text) < 40 else f"{text[:40]}...")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise error(f"{what} holds a key twice", where=where, found=_first_repeated(pairs))
        return values

    try:
        value: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=parse_float
        )
    except RecursionError as problem:
        raise error(f"{what} is nested too deeply", where=where) from problem
    except ValueError as problem:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise error(f"{what} is not JSON", where=where, found=problem) from problem
    if _SURROGATE_ESCAPE.search(raw):
        _refuse_lone_surrogates(value, what=what, where=where, error=error)
    return value


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return key


def _refuse_lone_surrogates(value: object, *, what: str, where: Where, error: type[StreamError]) -> None:
    """Such a string cannot be written to a file, a log or a socket again."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError as problem:
                raise error(f"{what} holds text that is not Unicode", where=where, found=ascii(item[:80])) from problem
