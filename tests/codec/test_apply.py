"""The would-be loop: base, then every delta of a chain, window by window."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.codec import (
    FULL,
    FULL_PLANES,
    XOR,
    MemoryPayload,
    encode_gf01,
    encode_overwrite,
    encode_xor,
    open_delta,
    would_be,
)
from gpusync.errors import ChainError, LayoutError, PayloadError

ENCODERS = {
    "xor": ("xor", encode_xor),
    "overwrite": ("overwrite", encode_overwrite),
    "gf01 xor": ("gpusync", lambda old, new: gf01(old, new, XOR)),
    "full planes": ("gpusync", lambda old, new: gf01(None, new, FULL_PLANES)),
    "full": ("gpusync", lambda old, new: gf01(None, new, FULL)),
}


def gf01(old, new, transform):
    return encode_gf01(old, new, transform=transform, element_bytes=2, float_order=True)


def chain_of(states, kinds):
    """Opened deltas from each state to the next; unchanged steps have none."""
    decoders = []
    for old, new, kind in zip(states, states[1:], kinds, strict=False):
        encoding, encode = ENCODERS[kind]
        payload = encode(old, new)
        if payload is not None:
            decoders.append(
                open_delta(
                    MemoryPayload(payload), encoding=encoding, nbytes=len(old), element_bytes=2, float_order=True
                )
            )
    return decoders


@given(
    count=st.integers(0, 150),
    kinds=st.lists(st.sampled_from(sorted(ENCODERS)), max_size=5),
    window=st.integers(1, 301),
    seed=st.integers(0, 5),
)
def test_a_chain_of_any_deltas(count, kinds, window, seed):
    rng = np.random.default_rng(seed)
    states = [rng.integers(0, 3, 2 * count, dtype=np.uint8) for _ in range(len(kinds) + 1)]
    decoders = chain_of(states, kinds)
    made = np.full(2 * count, 0xA5, np.uint8)
    for offset, old, new in would_be(MemoryPayload(states[0]), decoders, nbytes=2 * count, window_bytes=window):
        np.testing.assert_array_equal(old, states[0][offset : offset + len(new)])
        made[offset : offset + len(new)] = new
    np.testing.assert_array_equal(made, states[-1])


@pytest.mark.parametrize("nbytes", [0, 2, 62, (1 << 20) + 2])
def test_without_a_base(changed, nbytes):
    pair = changed(nbytes)
    middle = pair.old ^ np.uint8(255)
    decoders = chain_of([middle, middle ^ np.uint8(1), pair.new], ["full planes", "xor"])
    windows = [(len(old), new.copy()) for _, old, new in would_be(None, decoders, nbytes=nbytes)]
    assert {size for size, _ in windows} <= {0}
    np.testing.assert_array_equal(np.concatenate([new for _, new in windows] or [pair.new]), pair.new)


@pytest.mark.parametrize("kinds", [[], ["xor"], ["overwrite"], ["gf01 xor"], ["xor", "full"]])
def test_without_a_base_that_is_needed(changed, kinds, place, told):
    pair = changed(64)
    states = [pair.old, pair.new, pair.old]
    with pytest.raises(ChainError, match="nothing to apply") as caught:
        would_be(None, chain_of(states, kinds), nbytes=64, where=place)
    told(caught.value)


def test_no_delta_leaves_the_base():
    base = np.arange(100, dtype=np.uint8)
    windows = [new.copy() for _, _, new in would_be(MemoryPayload(base), [], nbytes=100, window_bytes=7)]
    np.testing.assert_array_equal(np.concatenate(windows), base)


def test_the_base_is_not_written(changed):
    pair = changed(1000)
    base = bytes(pair.old)
    for _ in would_be(MemoryPayload(base), chain_of([pair.old, pair.new], ["xor"]), nbytes=1000, window_bytes=64):
        pass
    assert base == bytes(pair.old)


@pytest.mark.parametrize("kind", sorted(ENCODERS))
def test_what_is_left_over_is_noticed_at_the_end(changed, kind):
    pair = changed(1000)
    encoding, encode = ENCODERS[kind]
    payload = MemoryPayload(encode(pair.old, pair.new) + b"\0" * 8)
    options = {"encoding": encoding, "nbytes": 1000, "element_bytes": 2, "float_order": True}
    with pytest.raises(PayloadError):
        list(would_be(MemoryPayload(pair.old), [open_delta(payload, **options)], nbytes=1000, window_bytes=64))


@pytest.mark.parametrize("kind", ["xor", "overwrite"])
def test_payload_of_an_empty_tensor_is_read_too(frame, kind):
    stored = frame(b"" if kind == "xor" else bytes(4))
    options = {"encoding": kind, "nbytes": 0, "element_bytes": 2, "float_order": True}
    empty = MemoryPayload(b"")
    assert list(would_be(empty, [open_delta(MemoryPayload(stored), **options)], nbytes=0)) == []
    with pytest.raises(PayloadError):
        list(would_be(empty, [open_delta(MemoryPayload(stored + b"!"), **options)], nbytes=0))


def test_scratch_is_used_and_must_do(changed):
    pair = changed(1000)
    scratch = np.empty(200, np.uint8)
    delta = chain_of([pair.old, pair.new], ["xor"])
    for _, old, new in would_be(MemoryPayload(pair.old), delta, nbytes=1000, window_bytes=100, scratch=scratch):
        assert np.shares_memory(old, scratch)
        assert np.shares_memory(new, scratch)
    with pytest.raises(LayoutError, match="scratch"):
        would_be(MemoryPayload(pair.old), delta, nbytes=1000, window_bytes=101, scratch=scratch)
    # A tensor smaller than the window needs no more than itself.
    list(would_be(MemoryPayload(pair.old[:9]), [], nbytes=9, window_bytes=1 << 20, scratch=scratch))


@pytest.mark.parametrize(("nbytes", "window"), [(99, 64), (101, 64), (100, 0)])
def test_base_or_window_that_does_not_fit(nbytes, window):
    with pytest.raises(LayoutError):
        would_be(MemoryPayload(bytes(100)), [], nbytes=nbytes, window_bytes=window)


def test_tensors_on_several_threads(changed):
    def decode(seed):
        pair = changed(300_001 + seed, seed=seed)
        delta = chain_of([pair.old, pair.new, pair.old], ["xor", "overwrite"])
        source = MemoryPayload(pair.old)
        windows = [new.copy() for _, _, new in would_be(source, delta, nbytes=len(pair.old), window_bytes=4096)]
        right[seed] = np.array_equal(np.concatenate(windows), pair.old)

    right = {}
    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == dict.fromkeys(range(8), True)
