"""The choice of a GF01 form: the smallest, without encoding what plainly is not."""

import numpy as np
import pytest

from gpusync.codec import (
    TRANSFORM_NAMES,
    MemoryPayload,
    choose_gf01,
    encode_gf01,
)
from gpusync.codec import choose as choose_module

NBYTES = 4 << 20


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
    "sparse": (changed_words(0.01), "xor"),
    "a tenth": (changed_words(0.1), "xor"),
    "unrelated weights": (bf16(len(OLD), seed=2), "full planes"),
    "all zero": (np.zeros_like(OLD), None),
    "noise": (np.random.default_rng(3).integers(0, 65536, len(OLD), dtype=np.uint16), None),
    "one word": (changed_words(0) + np.eye(1, len(OLD), 777_777, dtype=np.uint16)[0], "xor"),
    "a cluster at the start": (clustered(0, len(OLD) // 8), "xor"),
    "a cluster between samples": (clustered(34_000, 34_000 + len(OLD) // 30), "xor"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_base", [True, False])
def test_no_other_form_is_much_smaller(case, with_base):
    words, expected = CASES[case]
    old, new = OLD.view(np.uint8) if with_base else None, words.view(np.uint8)
    payload, name = choose_gf01(old, new, element_bytes=2, float_order=True)
    options = {"element_bytes": 2, "float_order": True}
    sizes = {
        TRANSFORM_NAMES[t]: len(encode_gf01(old, new, transform=t, **options))
        for t in ((0, 2, 3) if with_base else (2, 3))
    }
    assert len(payload) == sizes[name]
    assert len(payload) <= 1.02 * min(sizes.values())
    if with_base and expected is not None:
        assert name == expected
    assert len(payload) < 1.001 * NBYTES + 1024


def test_source_and_array_choose_alike():
    new = CASES["sparse"][0].view(np.uint8)
    options = {"element_bytes": 2, "float_order": True}
    expected = choose_gf01(OLD.view(np.uint8), new, **options)
    assert choose_gf01(MemoryPayload(OLD.view(np.uint8)), MemoryPayload(new), **options) == expected


@pytest.mark.parametrize("nbytes", [0, 2, NBYTES])
def test_equal_states(nbytes):
    old = OLD.view(np.uint8)[:nbytes]
    assert choose_gf01(old, old.copy(), element_bytes=2, float_order=True) == (None, "unchanged")


@pytest.mark.parametrize("nbytes", [0, 2, 64])
@pytest.mark.parametrize("element_bytes", [1, 2])
def test_small_tensors_decode(decode, nbytes, element_bytes):
    new = np.arange(nbytes, dtype=np.uint8)
    payload, name = choose_gf01(None, new, element_bytes=element_bytes, float_order=False)
    got = decode(payload, np.zeros(nbytes, np.uint8), encoding="gpusync", element_bytes=element_bytes)
    np.testing.assert_array_equal(got, new)
    assert name in TRANSFORM_NAMES


@pytest.mark.parametrize(("case", "most"), [("sparse", 1), ("unrelated weights", 2), ("one word", 1)])
def test_the_obvious_is_encoded_once(monkeypatch, case, most):
    whole = []

    def counting(old, new, **options):
        if len(new) == NBYTES:
            whole.append(options["transform"])
        return encode_gf01(old, new, **options)

    monkeypatch.setattr(choose_module, "encode_gf01", counting)
    choose_gf01(OLD.view(np.uint8), CASES[case][0].view(np.uint8), element_bytes=2, float_order=True)
    assert len(whole) <= most
