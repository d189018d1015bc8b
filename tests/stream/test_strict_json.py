"""JSON with one meaning."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import HeaderError, IndexFormatError, StreamError, Where
from gpusync.stream.limits import MAX_JSON_NODES
from gpusync.stream.strict_json import parse_json

WHERE = Where(path="x.json", version=3)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def parse(raw: bytes, error: type[StreamError] = IndexFormatError) -> object:
    return parse_json(raw, what="index", where=WHERE, error=error)


@given(VALUES, st.booleans())
def test_reads_what_json_writes(value: object, ascii_only: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize("kind", [IndexFormatError, HeaderError])
def test_error_is_of_the_callers_class_and_place(kind: type[StreamError]) -> None:
    with pytest.raises(kind) as caught:
        parse(b"{", kind)
    assert type(caught.value) is kind
    assert (caught.value.path, caught.value.version) == ("x.json", 3)
    assert str(caught.value).startswith("index is not JSON: in x.json, version 3")


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "a"),
        (b'[{"x": {"k": 1, "k": 1}}]', "k"),
        (b'{"\\u0061": 1, "a": 2}', "a"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "1e999"),
    ],
)
def test_what_it_found(raw: bytes, found: str) -> None:
    with pytest.raises(IndexFormatError) as caught:
        parse(raw)
    assert caught.value.found == found


@pytest.mark.parametrize("raw", [rb'["\\ud800"]', rb'["\ud83e\udd99"]', rb'["\uE000"]', rb'["\\\\ud800"]'])
def test_what_only_looks_like_a_lone_surrogate(raw: bytes) -> None:
    assert parse(raw) == json.loads(raw)


@pytest.mark.parametrize("raw", [rb'["\ud800"]', rb'{"\udfff": 1}', rb'{"a": [{"b": "x\uD800y"}]}', rb'["\\\ud800"]'])
def test_lone_surrogate_anywhere(raw: bytes) -> None:
    with pytest.raises(IndexFormatError, match="not Unicode"):
        parse(raw)


def test_limit_of_values_is_exact() -> None:
    # 2 for each pair of brackets and its comma, 1 for the outer bracket; the text counts, not its meaning
    assert parse(b'"' + b"," * MAX_JSON_NODES + b'"') == "," * MAX_JSON_NODES
    with pytest.raises(IndexFormatError) as caught:
        parse(b'"' + b"," * (MAX_JSON_NODES + 1) + b'"')
    assert caught.value.found == MAX_JSON_NODES + 1
