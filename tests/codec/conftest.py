"""What the codec tests share: hand-made frames, and a decode that watches the bytes around the target."""

import numpy as np
import pytest
import zstandard

from gpusync.codec import MemoryPayload, gs01, open_delta, would_be
from gpusync.errors import Where
from gpusync_kernels import using_host_ops
from support.loops import loops_of

PLACE = Where(path="weight_v000007/model-00002-of-00004.safetensors", version=7, tensor="model.embed.weight")
CANARY = 0xA5
MARGIN = 64


def make_frame(content, *, level=1, **options):
    """A zstd frame written by the library alone, in one call, with its content size."""
    return zstandard.ZstdCompressor(level=level, **options).compress(bytes(content))


def decode_payload(payload, old, *, encoding, window_bytes=1 << 20, element_bytes=1):
    """New bytes, by `apply` on windows of a buffer with canaries on both sides."""
    nbytes = len(old)
    buffer = np.full(nbytes + 2 * MARGIN, CANARY, np.uint8)
    target = buffer[MARGIN : MARGIN + nbytes]
    target[:] = old
    decoder = open_delta(
        MemoryPayload(payload),
        encoding=encoding,
        nbytes=nbytes,
        element_bytes=element_bytes,
        float_order=False,
        where=PLACE,
    )
    for offset in range(0, nbytes, window_bytes):
        decoder.apply(target[offset : offset + window_bytes], offset)
    decoder.finish()
    assert (buffer[:MARGIN] == CANARY).all()
    assert (buffer[MARGIN + nbytes :] == CANARY).all()
    return target.copy()


def decode_would_be(payload, old, *, encoding, window_bytes=1 << 20, element_bytes=1, base=True):
    """New bytes, by `would_be`; checks that it hands out the old ones beside them."""
    nbytes = len(old)
    decoder = open_delta(
        MemoryPayload(payload), encoding=encoding, nbytes=nbytes, element_bytes=element_bytes, float_order=False
    )
    target, seen = np.full(nbytes, CANARY, np.uint8), 0
    source = MemoryPayload(old) if base else None
    for offset, before, after in would_be(source, [decoder], nbytes=nbytes, window_bytes=window_bytes):
        assert offset == seen
        if base:
            np.testing.assert_array_equal(before, old[offset : offset + len(before)])
        target[offset : offset + len(after)] = after
        seen += len(after)
    assert seen == nbytes
    return target


@pytest.fixture(params=["numpy", "numba", "numba, blobs checked ahead"])
def loops(request, monkeypatch):
    """The host's loops: the reference, and the extra `fast`, which takes blobs of larger tensors in another way."""
    if request.param.endswith("ahead"):
        monkeypatch.setattr(gs01, "CHECKED_ABOVE_BYTES", 0)
    with using_host_ops(loops_of(request.param.split(",")[0])):
        yield request.param


@pytest.fixture(scope="session")
def frame():
    return make_frame


@pytest.fixture(scope="session")
def decode():
    return decode_payload


@pytest.fixture(scope="session")
def decode_by_would_be():
    return decode_would_be


@pytest.fixture(scope="session")
def place():
    return PLACE


@pytest.fixture(scope="session")
def told():
    """Asserts that an error carries the place it was given, in its fields and in its text."""

    def check(error):
        assert (error.path, error.version, error.tensor) == (PLACE.path, PLACE.version, PLACE.tensor)
        assert PLACE.tensor in str(error)
        assert PLACE.path in str(error)
        assert "\n" not in str(error)

    return check


class Changed:
    """Two states of a tensor, seeded."""

    def __init__(self, nbytes, *, density=0.02, seed=0):
        rng = np.random.default_rng([seed, nbytes])
        self.old = rng.integers(0, 256, nbytes, dtype=np.uint8)
        self.new = self.old.copy()
        count = min(nbytes, max(1, round(nbytes * density))) if nbytes else 0
        at = rng.permutation(nbytes)[:count]
        self.new[at] ^= rng.integers(1, 256, count, dtype=np.uint8)
        self.positions = np.sort(at)


@pytest.fixture(scope="session")
def changed():
    return Changed
