"""What the HTTP process asks the ranks, and their answers, as sglang's own kind of message.

The classes are made by `define_messages`, since they derive from one of sglang's; they are attributes of this module
then, by which a rank that gets one unpickles it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# `action` is prepare or abort. Updates and looks go separate ways: a look must not wait for an update.
REQUESTS = {"GpusyncUpdateReqInput": [("action", str), ("argument", str)], "GpusyncLookReqInput": []}
# `told` is JSON: the outcome, or the error.
ANSWERS = {"GpusyncUpdateReqOutput": [("success", bool), ("told", str)], "GpusyncLookReqOutput": [("told", str)]}


def define_messages() -> None:
    """Idempotent. Afterwards sglang's sockets carry them."""
    if "GpusyncUpdateReqInput" in globals():
        return
    import msgspec
    from sglang.srt.managers import io_struct

    made = [
        msgspec.defstruct(
            name, fields, bases=(io_struct.BaseReq,), module=__name__, tag=True, kw_only=True, array_like=True
        )
        for name, fields in {**REQUESTS, **ANSWERS}.items()
    ]
    globals().update({kind.__name__: kind for kind in made})
    io_struct.hook_custom_types(*made)


def message_type(name: str) -> Any:
    return globals()[name]


def build(name: str, **fields: object) -> Any:
    """A message; `argument` and `told` become JSON."""
    coded = {key: json.dumps(value) if key in ("argument", "told") else value for key, value in fields.items()}
    return message_type(name)(**coded)


def parse_told(answer: Any) -> Mapping[str, Any]:
    told = json.loads(answer.told)
    return told if isinstance(told, dict) else {}
