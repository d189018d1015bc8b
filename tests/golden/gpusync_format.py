"""A writer of small streams in gpusync's format, made from the format's description: nothing of gpusync is imported.

Random bytes come from SHAKE-128, so no library's version changes them. Compressed bytes depend on libzstd; what they
decode to does not.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
STREAM_ID = "5f0c3a52-3f0b-4d0e-9d7a-6b8f2f7f0a11"
XOR, STEP_PLANES, FULL_PLANES, FULL = range(4)

# dtype -> (bits of an element, es, order)
DTYPES = {
    "BOOL": (8, 1, 0), "U8": (8, 1, 0), "I8": (8, 1, 0), "F8_E4M3": (8, 1, 1), "F8_E8M0": (8, 1, 0), "F4": (4, 1, 0),
    "I16": (16, 2, 0), "F16": (16, 2, 1), "BF16": (16, 2, 1),
    "U32": (32, 4, 0), "F32": (32, 4, 1), "C64": (64, 4, 1),
    "I64": (64, 8, 0), "F64": (64, 8, 1),
}  # fmt: skip
CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def with_data(self, data: bytes) -> Tensor:
        return Tensor(self.dtype, self.shape, data)


State = dict[str, Tensor]


class Seeded:
    """Bytes and numbers that depend on the seed alone."""

    def __init__(self, seed: str) -> None:
        self._seed, self._calls = seed, 0

    def bytes(self, count: int) -> bytes:
        self._calls += 1
        return hashlib.shake_128(f"{self._seed}/{self._calls}".encode()).digest(count)

    def positions(self, count: int, below: int) -> np.ndarray:
        return np.unique(np.frombuffer(self.bytes(8 * count), "<u8") % below).astype(np.int64)


def compress(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=3, **options).compress(raw)


def raw_frame(content: bytes, *, declared: int, dictionary: int = 0, window: int | None = None) -> bytes:
    """A zstd frame by hand: one block that holds `content` as it is, under a header that declares what it is told."""
    descriptor = 0x80 | (0x20 if window is None else 0) | (1 if dictionary else 0)
    head = b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + (b"" if window is None else bytes([window]))
    head += (bytes([dictionary]) if dictionary else b"") + struct.pack("<I", declared)
    return head + (1 | len(content) << 3).to_bytes(3, "little") + content


def endless_frame(*, declared: int, blocks: int) -> bytes:
    """A frame whose blocks repeat a byte 131,072 times each, whatever it declares."""
    block = (1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"\0"
    last = (1 | 1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", declared) + block * (blocks - 1) + last


@dataclass
class Gf01:
    """A GF01 payload as its fields; a fault is one field changed before `pack`. None: what follows from the rest."""

    transform: int
    es: int
    order: int
    log2: int
    raw_bytes: int
    frames: list[bytes]
    magic: bytes = b"GF01"
    count: int | None = None
    reserved: int = 0
    sizes: list[int] | None = None
    table_pad: bytes = b"\0"
    end_pad: bytes = b"\0"

    def pack(self) -> bytes:
        sizes = [len(frame) for frame in self.frames] if self.sizes is None else self.sizes
        count = len(sizes) if self.count is None else self.count
        head = self.magic + bytes([self.transform, self.es, self.order, self.log2])
        head += struct.pack(f"<QII{len(sizes)}I", self.raw_bytes, count, self.reserved, *sizes)
        head += self.table_pad * (-len(head) % 8)
        body = head + b"".join(self.frames)
        return body + self.end_pad * (-len(body) % 8)


def gf01(old: Tensor, new: Tensor, *, transform: int, log2: int = 16, order: int | None = None, **zstd: Any) -> Gf01:
    _, es, natural = DTYPES[new.dtype]
    words = np.frombuffer(new.data, np.uint8)
    if transform == XOR:
        raw = (words ^ np.frombuffer(old.data, np.uint8)).tobytes()
    elif transform in (STEP_PLANES, FULL_PLANES):
        if transform == STEP_PLANES:
            words = np.frombuffer(_steps(old, new, es, natural if order is None else order), np.uint8)
        raw = b"".join(words[plane::es].tobytes() for plane in range(es))
    else:
        raw = new.data
    pieces = [raw[at : at + (1 << log2)] for at in range(0, len(raw), 1 << log2)]
    frames = [compress(piece, **zstd) for piece in pieces]
    return Gf01(transform, es, natural if order is None else order, log2, len(raw), frames)


def _steps(old: Tensor, new: Tensor, es: int, order: int) -> bytes:
    """The zig-zag coded steps, an element after the other."""
    coded, mask = [], (1 << 8 * es) - 1
    for was, now in zip(*(np.frombuffer(tensor.data, f"<u{es}").tolist() for tensor in (old, new)), strict=True):
        d = _ordered(now, es, order) - _ordered(was, es, order) & mask
        coded.append((d << 1 ^ (mask if d >> 8 * es - 1 else 0)) & mask)
    return np.array(coded, f"<u{es}").tobytes()


@dataclass
class Stream:
    """One GS01 stream: changes as (position in the part, value or new word), ascending. A fault is one field changed
    before `pack`.
    """

    part: int
    g: int
    k: int
    v: int
    kind: int
    es: int
    changes: list[tuple[int, int]]
    index_shift: int = 0
    zeros_more: int = 0
    stray_unary: int = 0
    stray_field: int = 0

    def pack(self) -> tuple[bytes, bytes]:
        """(descriptor, body)."""
        bits, unary, used, fields, pairs = self._packed()
        head = struct.pack("<IIIBBBB", len(self.changes), bits, self.part, self.g, self.k, self.v, self.kind)
        words = self._words()
        index = b"".join(struct.pack("<II", pos + (self.index_shift if pos else 0), rank) for pos, rank in pairs)
        body = index + unary.to_bytes(-(-bits // 32) * 4, "little") + fields.to_bytes(-(-used // 32) * 4, "little")
        return head, words + bytes(-len(words) % 8) + body + bytes(-len(body) % 8)

    def pack_small(self, part_before: int) -> tuple[bytes, bytes]:
        """The same for GP01."""
        bits, unary, used, fields, _ = self._packed()
        count = len(self.changes)
        head = leb128(self.part - part_before) + leb128(count) + leb128(bits - count + self.zeros_more)
        head += bytes([self.g | self.kind << 7, self.k, self.v])
        arrays = [(unary | self.stray_unary << bits, bits), (fields | self.stray_field << used, used)]
        return head, self._words() + b"".join(
            (value & (1 << -(-size // 8) * 8) - 1).to_bytes(-(-size // 8), "little") for value, size in arrays
        )

    def _words(self) -> bytes:
        return b"".join(value.to_bytes(self.es, "little") for _, value in self.changes) if self.kind else b""

    def _packed(self) -> tuple[int, int, int, int, list[tuple[int, int]]]:
        """(bits of unary, unary, bits of fields, fields, pairs of the index)."""
        unary = fields = bits = used = 0
        pairs, position, last = [(0, 0)], 0, -1
        for rank, (at, value) in enumerate(self.changes):
            gap = at - last - 1
            for zero in range(gap >> self.k):
                if bits + zero and (bits + zero) % 1024 == 0:
                    pairs.append((position, rank))
                position += 1 << self.k
            bits += gap >> self.k
            if bits and bits % 1024 == 0:
                pairs.append((position, rank))
            unary |= 1 << bits
            fields |= ((gap & (1 << self.k) - 1) | (0 if self.kind else value) << self.k) << used
            bits, used, last, position = bits + 1, used + self.k + self.v, at, at + 1
        return bits, unary, used, fields, pairs


@dataclass
class Gs01:
    """A GS01 payload as its fields, like `Gf01`."""

    es: int
    order: int
    log2: int
    elements: int
    streams: list[Stream]
    reserved: int = 0
    end: bytes = bytes(8)

    def pack(self) -> bytes:
        packed = [stream.pack() for stream in self.streams]
        head = b"GS01" + bytes([self.es, self.order, self.log2, 0])
        head += struct.pack("<QII", self.elements, len(packed), self.reserved)
        return head + b"".join(d for d, _ in packed) + b"".join(b for _, b in packed) + self.end

    def pack_small(self) -> bytes:
        """As GP01; `reserved` and `end` are not in it."""
        parts = [0, *(stream.part for stream in self.streams)]
        packed = [stream.pack_small(before) for stream, before in zip(self.streams, parts, strict=False)]
        head = b"GP01" + bytes([self.es.bit_length() - 1 | self.order << 2 | self.log2 - 10 << 3])
        head += leb128(self.elements) + leb128(len(packed))
        return head + b"".join(d for d, _ in packed) + b"".join(b for _, b in packed)


def leb128(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def gs01(
    old: Tensor, new: Tensor, *, log2: int = 10, k: int = 3, cuts: Sequence[int] = (1, 4), order: int | None = None
) -> Gs01:
    """Steps by their size: streams of classes [0, cuts[0]), [cuts[0], cuts[1]) and so on up to 15, then literals."""
    _, es, natural = DTYPES[new.dtype]
    order = natural if order is None else order
    before, after = (np.frombuffer(tensor.data, f"<u{es}").tolist() for tensor in (old, new))
    streams: dict[tuple[int, int], Stream] = {}
    borders = [0, *cuts, 15 if es > 1 else 8]
    for element, (was, now) in enumerate(zip(before, after, strict=True)):
        if was == now:
            continue
        d = _ordered(now, es, order) - _ordered(was, es, order) & (1 << 8 * es) - 1
        d -= (d >> 8 * es - 1) << 8 * es
        group = sum(abs(d) >= 1 << border for border in borders) - 1
        if group == len(borders) - 1 and es > 1:
            stream = Stream(element >> log2, 0, k, 0, 1, es, [])
            change = now
        else:
            group = min(group, len(borders) - 2)
            g, stop = borders[group], borders[group + 1]
            v = 1 + ((1 << stop) - (1 << g) - 1).bit_length()
            stream = Stream(element >> log2, g, min(k, 16), v, 0, es, [])
            change = (abs(d) - (1 << g)) << 1 | (d < 0)
        key = (element >> log2, group)
        streams.setdefault(key, stream).changes.append((element & (1 << log2) - 1, change))
    return Gs01(es, order, log2, len(before), [streams[key] for key in sorted(streams)])


def _ordered(word: int, es: int, order: int) -> int:
    """M of the format, a word again."""
    return word ^ ((1 << 8 * es - 1) - 1) if order and word >> 8 * es - 1 else word


def slime_payload(old: Tensor, new: Tensor, encoding: str) -> bytes:
    before, after = (np.frombuffer(tensor.data, np.uint8) for tensor in (old, new))
    if encoding == "xor":
        return compress((before ^ after).tobytes())
    at = np.flatnonzero(before != after)
    return compress(struct.pack("<I", len(at)) + at.astype("<u4").tobytes() + after[at].tobytes())


def encode_shard(
    entries: Sequence[tuple[str, str, Sequence[int], bytes]], metadata: Mapping[str, str] | None, *, shift: int = 0
) -> bytes:
    """A safetensors file. The data starts `shift` bytes behind a multiple of 8."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8 + shift)
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in entries)


def read_checkpoint(directory: Path) -> State:
    state: State = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                state[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[begin:end])
    return state


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def as_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


@dataclass
class Version:
    """One version, to be bent before it is written. `metadata` None for a key: leave it out.

    `stored` is what goes into the shards, name -> (dtype, shape, bytes); `payload_checksums` are filled in when it is
    written, for whatever is stored then, but for names that are there already (None: leave it out).
    """

    number: int
    metadata: dict[str, Any]
    stored: dict[str, tuple[str, Sequence[int], bytes]]
    checksums: dict[str, str | None]
    shards: int = 1
    shift: int = 0
    shard_metadata: dict[str, str] = field(default_factory=dict)
    payload_checksums: dict[str, str | None] = field(default_factory=dict)
    side_files: dict[str, bytes] = field(default_factory=dict)

    def write(self, source: Path) -> None:
        directory = source / f"weight_v{self.number:06d}"
        weight_map, shard_bytes, names = {}, {}, list(self.stored)
        for number in range(self.shards if names else 0):
            file, mine = f"{number}-of-{self.shards}.safetensors", names[number :: self.shards]
            sums = {name: checksum for name in mine if (checksum := self.checksums[name]) is not None}
            entries = [(name, *self.stored[name]) for name in mine]
            data = encode_shard(entries, {**self.shard_metadata, **sums}, shift=self.shift)
            write(directory / file, data)
            weight_map |= dict.fromkeys(mine, file)
            shard_bytes[file] = len(data)
        sums = {name: xxhash.xxh3_64(data).hexdigest() for name, (*_, data) in self.stored.items()}
        metadata = {
            "version": f"{self.number:06d}",
            "stream_id": STREAM_ID,
            "shard_bytes": shard_bytes,
            "payload_checksums": _without_none({**sums, **self.payload_checksums}),
            **self.metadata,
        }
        index = {"metadata": _without_none(metadata), "weight_map": weight_map}
        write(directory / INDEX, as_json(index))
        for name, data in self.side_files.items():
            write(directory / name, data)


def delta(
    number: int,
    old: State,
    new: State,
    payloads: Mapping[str, bytes],
    *,
    base: int | None = None,
    encoding: str = "gpusync",
    checksum: str = "xxh3-128",
    **options: Any,
) -> Version:
    """`payloads` by tensor, already packed. Checks that they make `new` of `old`."""
    for name, payload in payloads.items():
        if decode(payload, old[name], encoding) != new[name].data:
            raise ValueError(f"the payload of {name} in version {number} is not sound")
    for name in new:
        if new[name] != old[name] and name not in payloads:
            raise ValueError(f"version {number} lacks a payload for {name}")
    metadata = {
        "base_version": f"{number - 1 if base is None else base:06d}",
        "delta_encoding": encoding,
        "compression_format": "none" if encoding == "gpusync" else "zstd",
        "checksum_format": checksum,
    }
    stored = {name: ("U8", (len(payload),), payload) for name, payload in payloads.items()}
    checksums: dict[str, str | None] = {name: CHECKSUMS[checksum](new[name].data) for name in payloads}
    return Version(number, metadata, stored, checksums, **options)


def full(number: int, state: State, *, checksum: str = "xxh3-128", **options: Any) -> Version:
    metadata = {"total_size": sum(len(tensor.data) for tensor in state.values()), "checksum_format": checksum}
    stored = {name: (tensor.dtype, tensor.shape, tensor.data) for name, tensor in state.items()}
    checksums: dict[str, str | None] = {name: CHECKSUMS[checksum](tensor.data) for name, tensor in state.items()}
    return Version(number, metadata, stored, checksums, shard_metadata={"format": "pt"}, **options)


def decode(payload: bytes, old: Tensor, encoding: str) -> bytes:
    """The new bytes, by the shortest way there is: to check every sound payload that is written."""
    before = np.frombuffer(old.data, np.uint8)
    if encoding == "overwrite":
        raw = zstandard.decompress(payload)
        (count,) = struct.unpack("<I", raw[:4])
        after = before.copy()
        after[np.frombuffer(raw, "<u4", count, 4)] = np.frombuffer(raw, np.uint8, count, 4 + 4 * count)
        return after.tobytes()
    if encoding == "xor":
        return (before ^ np.frombuffer(zstandard.decompress(payload), np.uint8)).tobytes()
    if payload[:4] == b"GS01":
        return _decode_gs01(payload, old)
    if payload[:4] == b"GP01":
        return _decode_gp01(payload, old)
    transform, es, order = payload[4], payload[5], payload[6]
    (frames,) = struct.unpack_from("<I", payload, 16)
    sizes = struct.unpack_from(f"<{frames}I", payload, 24)
    at = 24 + 4 * frames + 4 * (frames % 2)
    raw = b""
    for size in sizes:
        raw += zstandard.decompress(payload[at : at + size])
        at += size
    words = np.frombuffer(raw, np.uint8)
    if transform == XOR:
        return (before ^ words).tobytes()
    joined = words.reshape(es, -1).T.tobytes() if transform in (STEP_PLANES, FULL_PLANES) else raw
    if transform != STEP_PLANES:
        return joined
    mask = (1 << 8 * es) - 1
    pairs = zip(*(np.frombuffer(data, f"<u{es}").tolist() for data in (old.data, joined)), strict=True)
    moved = [_ordered(_ordered(was, es, order) + (code >> 1 ^ -(code & 1)) & mask, es, order) for was, code in pairs]
    return np.array(moved, f"<u{es}").tobytes()


def _decode_gs01(payload: bytes, old: Tensor) -> bytes:
    es, order, log2 = payload[4], payload[5], payload[6]
    n, count = struct.unpack_from("<QI", payload, 8)
    words, at = np.frombuffer(old.data, f"<u{es}").tolist(), 24 + 16 * count
    if len(words) != n:
        raise ValueError("another tensor")
    for number in range(count):
        head = struct.unpack_from("<IIIBBBB", payload, 24 + 16 * number)
        changes, bits, part, _, k, v, kind = head
        literals, at = at, at + (-(-changes * es // 8) * 8 if kind else 0)
        fields_at = at + 8 * -(-bits // 1024) + 4 * -(-bits // 32)
        end = fields_at + 4 * -(-changes * (k + v) // 32)
        arrays = payload[literals:at], payload[fields_at - 4 * -(-bits // 32) : fields_at], payload[fields_at:end]
        _change(words, es, order, part << log2, head, arrays)
        at += -(-(end - at) // 8) * 8
    return np.array(words, f"<u{es}").tobytes()


def _decode_gp01(payload: bytes, old: Tensor) -> bytes:
    es, order, log2 = 1 << (payload[4] & 3), payload[4] >> 2 & 1, 10 + (payload[4] >> 3)
    left = iter(payload[5:])

    def number() -> int:
        byte = next(left)
        return byte if byte < 128 else byte - 128 + 128 * number()

    words, heads, part = np.frombuffer(old.data, f"<u{es}").tolist(), [], 0
    if len(words) != number():
        raise ValueError("another tensor")
    for _ in range(number()):
        part, changes, zeros = part + number(), number(), number()
        g, k, v = next(left), next(left), next(left)
        heads.append((changes, changes + zeros, part, g & 127, k, v, g >> 7))
    for head in heads:
        changes, bits, part, _, k, v, kind = head
        sizes = kind * changes * es, -(-bits // 8), -(-changes * (k + v) // 8)
        _change(words, es, order, part << log2, head, [bytes(next(left) for _ in range(size)) for size in sizes])
    if list(left):
        raise ValueError("bytes behind the last stream")
    return np.array(words, f"<u{es}").tobytes()


def _change(words: list[int], es: int, order: int, position: int, head: Sequence[int], arrays: Sequence[bytes]) -> None:
    """One stream, whose positions count from `position`; `arrays`: its literals, unary and fields."""
    _, bits, _, g, k, v, kind = head
    literals, unary, fields = arrays[0], *(int.from_bytes(array, "little") for array in arrays[1:])
    rank, mask = 0, (1 << 8 * es) - 1
    for bit in range(bits):
        if not unary >> bit & 1:
            position += 1 << k
            continue
        field = fields >> rank * (k + v) & (1 << k + v) - 1
        position += (field & (1 << k) - 1) + 1
        size = (field >> k + 1) + (1 << g)
        step = -size if field >> k & 1 else size
        moved = _ordered(_ordered(words[position - 1], es, order) + step & mask, es, order)
        literal = int.from_bytes(literals[rank * es :][:es], "little")
        words[position - 1], rank = literal if kind else moved, rank + 1


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
