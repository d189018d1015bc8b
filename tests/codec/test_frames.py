"""One frame, all of it, nothing else: what a frame reader gives and what it refuses."""

import subprocess
import sys

import numpy as np
import pytest
import zstandard

from gpusync.codec import MemoryPayload
from gpusync.codec.frames import CHUNK_BYTES, FrameReader
from gpusync.errors import PayloadError, SourceReadError

# Incompressible, so that the stored bytes span several chunks; sparse, so that one chunk holds many blocks.
DENSE = np.random.default_rng(3).integers(0, 256, 3 * CHUNK_BYTES + 17, dtype=np.uint8).tobytes()
SPARSE = bytes(700_001) + b"x" + bytes(99)
CONTENTS = [b"", b"a", bytes(63), SPARSE, DENSE]


def read_all(stored, content_size, *, step=100_003, where=None):
    options = {} if where is None else {"where": where}
    reader = FrameReader(MemoryPayload(stored), content_size=content_size, **options)
    content = np.full(content_size, 0xA5, np.uint8)
    for start in range(0, content_size, step):
        reader.read_into(content[start : start + step])
    reader.finish()
    return content.tobytes()


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("step", [997, 1 << 20])
@pytest.mark.parametrize("write_checksum", [False, True])
def test_gives_the_content(frame, content, step, write_checksum):
    assert read_all(frame(content, write_checksum=write_checksum), len(content), step=step) == content


def test_skip_is_a_read(frame):
    reader = FrameReader(MemoryPayload(frame(DENSE)), content_size=len(DENSE))
    reader.skip(len(DENSE) - 3)
    tail = np.empty(3, np.uint8)
    reader.read_into(tail)
    reader.finish()
    assert tail.tobytes() == DENSE[-3:]


def sizeless(content):
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


def with_dictionary(content):
    dictionary = zstandard.ZstdCompressionDict(bytes(range(256)) * 8, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    trained = zstandard.train_dictionary(4096, [bytes([i, i // 2, 7]) * 50 for i in range(200)])
    assert dictionary.dict_id() == 0
    return zstandard.ZstdCompressor(dict_data=trained).compress(content)


def flip(stored, at, bit=1):
    damaged = bytearray(stored)
    damaged[at] ^= bit
    return bytes(damaged)


SKIPPABLE = bytes.fromhex("502a4d18") + (4).to_bytes(4, "little") + b"skip"


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda f, c: f + f, "second zstd frame"),
        (lambda f, c: f + zstandard.compress(b""), "second zstd frame"),
        (lambda f, c: f + b"\0", "bytes follow"),
        (lambda f, c: f + bytes(5), "bytes follow"),
        (lambda f, c: f + SKIPPABLE, "bytes follow"),
        (lambda f, c: SKIPPABLE + f, "no zstd frame"),
        (lambda f, c: f[:-1], "cut"),
        (lambda f, c: f[: len(f) // 2 + 1], "cut"),
        (lambda f, c: f[:5], "cut"),
        (lambda f, c: b"", "no zstd frame"),
        (lambda f, c: zstandard.compress(c + b"z"), "another content size"),
        (lambda f, c: sizeless(c), "no content size"),
        (lambda f, c: with_dictionary(c), "dictionary"),
        (lambda f, c: flip(zstandard.ZstdCompressor(write_checksum=True).compress(c), -1), "damaged"),
        (lambda f, c: zstandard.ZstdCompressor(write_checksum=True).compress(c)[:-1], "cut"),
        (lambda f, c: zstandard.ZstdCompressor(write_checksum=True).compress(c) + b"\1", "bytes follow"),
    ],
)
def test_refused(frame, content, change, what, place, told):
    with pytest.raises(PayloadError, match=what) as caught:
        read_all(change(frame(content), content), len(content), where=place)
    told(caught.value)


def test_declared_size_that_is_a_lie():
    # says 7, holds 2 (raw), and says 2, holds 7 (RLE): libzstd never gets to write past the declared size
    for size, body in ((7, "1100006162"), (2, "3b000063")):
        stored = bytes.fromhex("28b52ffd20") + bytes([size]) + bytes.fromhex(body)
        with pytest.raises(PayloadError):
            read_all(stored, size)


@pytest.mark.parametrize("at", range(5, 48))
def test_any_damage_of_a_frame_with_a_checksum_is_an_error(at):
    content = bytes(range(97, 123)) * 40
    stored = flip(zstandard.ZstdCompressor(write_checksum=True).compress(content), at, 0x10)
    with pytest.raises(PayloadError):
        read_all(stored, len(content))


def test_read_past_the_declared_size(frame, place, told):
    reader = FrameReader(MemoryPayload(frame(b"abc")), content_size=3, where=place)
    with pytest.raises(PayloadError, match="less than its tensor needs") as caught:
        reader.read_into(np.empty(4, np.uint8))
    told(caught.value)


def test_finish_before_all_was_read(frame):
    reader = FrameReader(MemoryPayload(frame(b"abc")), content_size=3)
    with pytest.raises(PayloadError, match="more than was read"):
        reader.finish()


def test_error_of_the_source_comes_through(frame):
    class Failing(MemoryPayload):
        def read_into(self, offset, buffer):
            if offset:
                raise SourceReadError("Stale file handle", path="shard")
            super().read_into(offset, buffer)

    reader = FrameReader(Failing(frame(DENSE)), content_size=len(DENSE))
    with pytest.raises(SourceReadError, match="Stale"):
        reader.skip(len(DENSE))


def test_fetches_bounded_chunks_once_and_in_order(frame):
    class Recording(MemoryPayload):
        def read_into(self, offset, buffer):
            reads.append((offset, len(buffer)))
            super().read_into(offset, buffer)

    reads = []
    stored = frame(DENSE)
    reader = FrameReader(Recording(stored), content_size=len(DENSE))
    reader.skip(len(DENSE))
    reader.finish()
    head, *chunks = reads
    assert head == (0, 18)
    assert max(size for _, size in chunks) <= CHUNK_BYTES
    assert [offset for offset, _ in chunks] == list(range(0, len(stored), CHUNK_BYTES))


BOMB_RUN = """
import re, sys
import numpy as np
from gpusync.codec import MemoryPayload, open_delta, would_be
from gpusync.errors import PayloadError
payload, nbytes, encoding = MemoryPayload(open(sys.argv[1], "rb").read()), int(sys.argv[2]), sys.argv[3]
class Zeros:
    def __init__(self, nbytes): self.nbytes = nbytes
    def read_into(self, offset, buffer): np.frombuffer(buffer, np.uint8)[:] = 0
def peak_kib():  # not ru_maxrss: that of a child starts at what its parent had when it was forked
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak_kib()
try:
    delta = open_delta(payload, encoding=encoding, nbytes=nbytes, element_bytes=1, float_order=False)
    for _ in would_be(Zeros(nbytes), [delta], nbytes=nbytes): pass
    print("decoded")
except PayloadError as error:
    print("refused", error)
peak = peak_kib()
assert peak < 300 << 10, peak
assert peak - before < 32 << 10, (before, peak)
"""


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """A sound frame of 1 GiB of zeros in about 32 KB."""
    path = tmp_path_factory.mktemp("bomb") / "payload"
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    zeros = bytes(1 << 24)
    path.write_bytes(b"".join(compressor.compress(zeros) for _ in range(64)) + compressor.flush())
    assert path.stat().st_size < 128 << 10
    return path


@pytest.mark.parametrize(
    ("nbytes", "encoding", "outcome"),
    [
        (1000, "xor", "refused"),
        (1000, "overwrite", "refused"),
        (1 << 30, "xor", "decoded"),  # what it declares is what the tensor needs: decoded, in windows
        ((1 << 30) // 5 + 100, "overwrite", "refused"),
    ],
)
def test_bomb_takes_no_memory(bomb, nbytes, encoding, outcome):
    command = [sys.executable, "-c", BOMB_RUN, str(bomb), str(nbytes), encoding]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(outcome), done.stdout
