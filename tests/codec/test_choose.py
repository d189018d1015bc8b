"""The choice of a payload's form: about the smallest, without encoding what plainly is not."""

import numpy as np
import pytest

from gpusync.codec import (
    FULL,
    FULL_PLANES,
    STEP_PLANES,
    TRANSFORM_NAMES,
    Gs01Steps,
    MemoryPayload,
    choose_payload,
    encode_gf01,
    encode_gs01,
)
from gpusync.codec import choose as choose_module

NBYTES = 4 << 20
SPARSE, FEW, PLANES = "GS01", "GP01", "GF01 step planes"
OPTIONS = {"element_bytes": 2, "float_order": True}


def bf16(count, seed=0):
    """Weights as they are: high bytes of a narrow distribution, low bytes of noise."""
    floats = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


OLD = bf16(NBYTES // 2)


def changed_words(share):
    rng = np.random.default_rng(9)
    words = OLD.copy()
    at = rng.random(len(words)) < share
    words[at] += rng.integers(1, 3, int(at.sum()), dtype=np.uint16)
    return words


def clustered(start, stop):
    words = OLD.copy()
    words[start:stop] = np.random.default_rng(1).integers(0, 65536, stop - start)
    return words


CASES = {
    "few": (changed_words(0.003), FEW),
    "sparse": (changed_words(0.01), SPARSE),
    "a tenth": (changed_words(0.1), SPARSE),
    "half": (changed_words(0.5), SPARSE),
    "all by a little": (changed_words(1), PLANES),
    "unrelated weights": (bf16(len(OLD), seed=2), None),
    "all zero": (np.zeros_like(OLD), "GF01 full planes"),
    "all but a few zero": (np.where(np.arange(len(OLD)) % 97 == 0, OLD, 0).astype(np.uint16), None),
    "noise": (np.random.default_rng(3).integers(0, 65536, len(OLD), dtype=np.uint16), None),
    "one word": (changed_words(0) + np.eye(1, len(OLD), 777_777, dtype=np.uint16)[0], FEW),
    "a cluster at the start": (clustered(0, len(OLD) // 8), None),
    "a cluster between samples": (clustered(34_000, 34_000 + len(OLD) // 30), None),
}


def sizes(old, new):
    """Every form there is, encoded."""
    found = {f"GF01 {TRANSFORM_NAMES[t]}": encode_gf01(None, new, transform=t, **OPTIONS) for t in (FULL_PLANES, FULL)}
    if old is not None:
        steps = Gs01Steps(old, new, **OPTIONS)
        found[SPARSE] = encode_gs01(old, new, **OPTIONS)
        found[FEW] = steps.encode() if steps.changed <= 8192 else found[SPARSE]
        found[PLANES] = encode_gf01(old, new, transform=STEP_PLANES, **OPTIONS)
    return {name: len(payload) for name, payload in found.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_base", [True, False])
def test_no_other_form_is_much_smaller(case, with_base):
    words, expected = CASES[case]
    old, new = OLD.view(np.uint8) if with_base else None, words.view(np.uint8)
    payload, name = choose_payload(old, new, **OPTIONS)
    others = sizes(old, new)
    assert len(payload) == others[name]
    assert len(payload) <= 1.02 * min(others["GF01 full"], others["GF01 full planes"])
    if "cluster" not in case:  # where changes cluster GS01 pays a little for the gap between
        assert len(payload) <= 1.02 * min(others.values())
    if with_base and expected is not None:
        assert name == expected
    assert len(payload) < 1.001 * NBYTES + 1024


def test_source_and_array_choose_alike():
    new = CASES["sparse"][0].view(np.uint8)
    expected = choose_payload(OLD.view(np.uint8), new, **OPTIONS)
    assert choose_payload(MemoryPayload(OLD.view(np.uint8)), MemoryPayload(new), **OPTIONS) == expected


@pytest.mark.parametrize("nbytes", [0, 2, NBYTES])
def test_equal_states(nbytes):
    old = OLD.view(np.uint8)[:nbytes]
    assert choose_payload(old, old.copy(), **OPTIONS) == (None, "unchanged")


@pytest.mark.parametrize("nbytes", [0, 2, 64])
@pytest.mark.parametrize("element_bytes", [1, 2])
def test_small_tensors_decode(decode, nbytes, element_bytes):
    new = np.arange(nbytes, dtype=np.uint8)
    payload, name = choose_payload(None, new, element_bytes=element_bytes, float_order=False)
    got = decode(payload, np.zeros(nbytes, np.uint8), encoding="gpusync", element_bytes=element_bytes)
    np.testing.assert_array_equal(got, new)
    assert name.removeprefix("GF01 ") in TRANSFORM_NAMES


@pytest.mark.parametrize(
    ("case", "most"),
    [("few", 0), ("sparse", 0), ("unrelated weights", 2), ("one word", 0), ("half", 1), ("all by a little", 1)],
)
def test_the_obvious_is_encoded_once(monkeypatch, case, most):
    whole = []

    def counting(old, new, **options):
        if len(new) == NBYTES:
            whole.append(options["transform"])
        return encode_gf01(old, new, **options)

    monkeypatch.setattr(choose_module, "encode_gf01", counting)
    choose_payload(OLD.view(np.uint8), CASES[case][0].view(np.uint8), **OPTIONS)
    assert len(whole) <= most
