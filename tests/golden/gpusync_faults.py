"""Versions in gpusync's format with one fault each. Without the fault each is sound, checksums included."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from gpusync_format import (
    FULL,
    FULL_PLANES,
    XOR,
    Gf01,
    Gs01,
    Seeded,
    State,
    Version,
    as_json,
    compress,
    delta,
    endless_frame,
    full,
    gf01,
    gs01,
    leb128,
    raw_frame,
    write,
)

# Two frames, xor. One frame of raw bytes whose table is padded: full planes, full. Nothing.
EMBED = "model.embed_tokens.weight"
NORM = "model.layers.0.input_layernorm.weight"
BYTES = "edge.i8_129"
EMPTY = "model.empty.f32"
FORMS = {EMBED: XOR, NORM: FULL_PLANES, BYTES: FULL, EMPTY: FULL}
OTHER_STREAM = "0e5b6a0c-9f31-4a54-8f5c-3f7b0a6d2c22"
V1 = ["weight_v000001", "version 1", "000001"]


class Faults:
    """Writes cases, each from a fresh sound version."""

    def __init__(self, out: Path, base: State) -> None:
        self._out = out
        self.states = [base]
        for number in (1, 2):
            self.states.append(_changed(self.states[-1], f"faults {number}"))

    def sound(self, number: int = 1) -> Version:
        payloads = {name: form.pack() for name, form in self.forms(number).items()}
        return delta(number, *self.states[number - 1 : number + 1], payloads)

    def forms(self, number: int = 1) -> dict[str, Gf01]:
        old, new = self.states[number - 1 : number + 1]
        return {name: gf01(old[name], new[name], transform=transform) for name, transform in FORMS.items()}

    def case(
        self,
        name: str,
        what: str,
        *,
        stage: str,
        error: str,
        says: str,
        names: list[str],
        versions: list[Version],
        start: int = 0,
        target: int = 1,
        after: Callable[[Path], None] | None = None,
    ) -> None:
        source = self._out / name / "source"
        for version in versions:
            version.write(source)
        if after is not None:
            after(source)
        told = {
            "what": what, "stage": stage, "error": error, "says": says, "names": names,
            "base": "../../../vectors/base", "source": "source", "start": start, "target": target,
        }  # fmt: skip
        write(self._out / name / "case.json", as_json(told))

    def bent(self, name: str, what: str, bend: Callable[[Version], None], *, error: str, says: str, names: list[str],
             stage: str = "index") -> None:  # fmt: skip
        """A fault of the version around its payloads."""
        version = self.sound()
        bend(version)
        self.case(name, what, stage=stage, error=error, says=says, names=names, versions=[version])

    def payload(self, name: str, what: str, tensor: str, change: Callable[[bytes], bytes], *, says: str,
                error: str = "PayloadError") -> None:  # fmt: skip
        """A fault of one stored payload, whose checksum in the index fits the fault."""
        version = self.sound()
        _, _, stored = version.stored[tensor]
        new = change(stored)
        if new == stored:
            raise ValueError(f"{name} changes nothing")
        version.stored[tensor] = ("U8", (len(new),), new)
        self.case(name, what, stage="payload", error=error, says=says, names=[tensor], versions=[version])

    def field(
        self, name: str, what: str, tensor: str, *, says: str, error: str = "PayloadError", **fields: object
    ) -> None:
        """A fault of one GF01 payload, likewise: `fields` are what they should not be."""
        form = self.forms()[tensor]
        for field, value in fields.items():
            setattr(form, field, value)
        self.payload(name, what, tensor, lambda _: form.pack(), says=says, error=error)

    def frame(self, name: str, what: str, frame: bytes, *, says: str) -> None:
        """The one frame of a tensor is another one; its size in the table fits."""
        self.field(name, what, BYTES, frames=[frame], says=says)


def write_faults(faults: Faults) -> None:
    _write_index_faults(faults)
    _write_checksum_faults(faults)
    _write_full_faults(faults)
    _write_header_faults(faults)
    _write_table_faults(faults)
    _write_frame_faults(faults)
    _write_gs01_faults(faults)
    _write_gp01_faults(faults)


def _changed(state: State, seed: str) -> State:
    seeded, after = Seeded(seed), dict(state)
    embed = bytearray(state[EMBED].data)
    for at in seeded.positions(12, len(embed)):
        embed[at] ^= 3
    after[EMBED] = state[EMBED].with_data(bytes(embed))
    for name in (NORM, BYTES):
        after[name] = state[name].with_data(seeded.bytes(len(state[name].data)))
    return after


def _put(values: dict, key: str, value: object) -> None:
    values[key] = value


def _write_index_faults(faults: Faults) -> None:
    def shard_bytes(more: int) -> Callable[[Path], None]:
        def change(source: Path) -> None:
            index = source / "weight_v000001" / "model.safetensors.index.json"
            nbytes = (source / "weight_v000001" / "0-of-1.safetensors").stat().st_size
            text = index.read_text()
            index.write_text(text.replace(f'safetensors": {nbytes}', f'safetensors": {nbytes + more}'))

        return change

    shard = ["0-of-1.safetensors"]
    for name, what, more, error, says in (
        ("shard_bytes_more", "shard_bytes says 8 bytes more than there are", 8, "VersionMissingError", "as long as"),
        ("shard_bytes_less", "shard_bytes says 8 bytes less than there are", -8, "HeaderError", "as long as"),
    ):
        faults.case(
            name, what, stage="index", error=error, says=says, names=shard, versions=[faults.sound()],
            after=shard_bytes(more),
        )  # fmt: skip
    faults.bent(
        "compression_zstd", "compression_format is zstd, with delta_encoding gpusync",
        lambda v: v.metadata.update(compression_format="zstd"),
        error="UnsupportedFormatError", says="does not go with gpusync", names=V1,
    )  # fmt: skip
    faults.bent(
        "compression_missing", "no compression_format",
        lambda v: v.metadata.update(compression_format=None),
        error="IndexFormatError", says="lacks compression_format", names=V1,
    )  # fmt: skip
    faults.bent(
        "delta_encoding_missing", "no delta_encoding, everything else of a delta is there",
        lambda v: v.metadata.update(delta_encoding=None),
        error="IndexFormatError", says="no delta_encoding", names=V1,
    )  # fmt: skip
    another = faults.sound(2)
    another.metadata["stream_id"] = OTHER_STREAM
    faults.case(
        "stream_id_of_another", "v2 belongs to another stream than v1, on which it builds", stage="chain",
        error="ChainError", says="another stream", names=["version 2", OTHER_STREAM],
        versions=[faults.sound(), another], start=1, target=2,
    )  # fmt: skip
    faults.bent(
        "stream_id_no_text", "stream_id is a number", lambda v: v.metadata.update(stream_id=7),
        error="IndexFormatError", says="stream_id", names=V1,
    )  # fmt: skip


def _write_checksum_faults(faults: Faults) -> None:
    def damage(source: Path) -> None:
        """One bit of a raw block: the frame still decodes."""
        shard = source / "weight_v000001" / "0-of-1.safetensors"
        data, middle = bytearray(shard.read_bytes()), faults.states[1][BYTES].data[100:120]
        data[data.index(middle) + 3] ^= 0x10
        shard.write_bytes(data)

    faults.case(
        "payload_damaged", "one bit of a stored payload has flipped", stage="payload", error="PayloadError",
        says="xxh3-64", names=[BYTES], versions=[faults.sound()], after=damage,
    )  # fmt: skip
    faults.bent(
        "payload_checksum_wrong", "a payload checksum is that of other bytes; the payload is sound",
        lambda v: _put(v.payload_checksums, NORM, "0123456789abcdef"),
        error="PayloadError", says="xxh3-64", names=[NORM], stage="payload",
    )  # fmt: skip
    faults.bent(
        "payload_checksum_missing", "payload_checksums lacks one tensor",
        lambda v: _put(v.payload_checksums, NORM, None),
        error="IndexFormatError", says="payload_checksums", names=[NORM],
    )  # fmt: skip
    faults.bent(
        "payload_checksums_missing", "no payload_checksums at all",
        lambda v: v.metadata.update(payload_checksums=None),
        error="IndexFormatError", says="payload_checksums", names=[EMBED, NORM, BYTES, EMPTY],
    )  # fmt: skip
    faults.bent(
        "payload_checksum_short", "a payload checksum of 15 digits",
        lambda v: _put(v.payload_checksums, NORM, "0123456789abcde"),
        error="IndexFormatError", says="malformed", names=[NORM],
    )  # fmt: skip
    faults.bent(
        "payload_checksum_of_nothing", "payload_checksums names a tensor that weight_map does not",
        lambda v: _put(v.payload_checksums, "model.norm.weight", "0123456789abcdef"),
        error="IndexFormatError", says="weight_map", names=["model.norm.weight"],
    )  # fmt: skip
    faults.bent(
        "checksum_wrong", "the checksum of a tensor's new state is wrong by one digit; its payload checksum is right",
        lambda v: _put(v.checksums, NORM, _other_digit(v.checksums[NORM])),
        error="DigestMismatchError", says="would-be state", names=[NORM], stage="checksum",
    )  # fmt: skip
    faults.bent(
        "checksum_missing", "a tensor has a payload checksum, but none of its new state",
        lambda v: _put(v.checksums, NORM, None),
        error="HeaderError", says="no checksum", names=[NORM], stage="header",
    )  # fmt: skip
    faults.bent(
        "payload_not_bytes", "a payload's entry has two dimensions",
        lambda v: _put(v.stored, NORM, ("U8", (2, len(v.stored[NORM][2]) // 2), v.stored[NORM][2])),
        error="HeaderError", says="no vector of bytes", names=[NORM], stage="header",
    )  # fmt: skip


def _write_full_faults(faults: Faults) -> None:
    """v1 is a full version of a few tensors."""
    state = {name: faults.states[1][name] for name in (NORM, BYTES, EMPTY)}

    def case(name: str, what: str, bend: Callable[[Version], None], *, error: str, says: str, stage: str) -> None:
        version = full(1, state)
        bend(version)
        faults.case(name, what, stage=stage, error=error, says=says, names=[NORM], versions=[version])

    case(
        "full_checksum_wrong", "a full version, one checksum is wrong by one digit",
        lambda v: _put(v.checksums, NORM, _other_digit(v.checksums[NORM])),
        error="DigestMismatchError", says="published checksum", stage="checksum",
    )  # fmt: skip
    case(
        "full_checksum_missing", "a full version with checksum_format, one tensor has no checksum",
        lambda v: _put(v.checksums, NORM, None), error="HeaderError", says="no checksum", stage="header",
    )  # fmt: skip


def _write_header_faults(faults: Faults) -> None:
    """Every field of the 24 bytes; the payload checksum fits."""
    field, payload, later = faults.field, faults.payload, "UnsupportedFormatError"
    nbytes = len(faults.states[0][NORM].data)
    field("magic_unknown", "magic is GF02", NORM, magic=b"GF02", says="none of gpusync's forms")
    field("magic_gs02", "magic is GS02, reserved for now", NORM, magic=b"GS02", says="not supported", error=later)
    field("transform_4", "transform is 4", NORM, transform=4, says="transform")
    field("transform_7", "transform is 7", BYTES, transform=7, says="transform")
    field("es_half", "es is 1 for BF16", NORM, es=1, says="element size")
    field("es_double", "es is 4 for BF16, where xor does not need it", EMBED, es=4, says="element size")
    field("es_zero", "es is 0", NORM, es=0, says="element size")
    field("order_2", "order is 2", NORM, order=2, says="order")
    field("log2_15", "frames of 32 KiB", NORM, log2=15, says="log2 of frame_bytes")
    field("log2_21", "frames of 2 MiB", NORM, log2=21, says="log2 of frame_bytes")
    field("log2_other", "two frames, said to be of 128 KiB", EMBED, log2=17, says="number of frames")
    field("raw_bytes_more", "raw_bytes is an element more than there are", NORM, raw_bytes=nbytes + 2, says="raw_bytes")
    field("raw_bytes_less", "raw_bytes is an element less than there are", NORM, raw_bytes=nbytes - 2, says="raw_bytes")
    field("raw_bytes_huge", "raw_bytes is 2**63", NORM, raw_bytes=2**63, says="raw_bytes")
    field("raw_bytes_of_nothing", "raw_bytes of a tensor of no bytes is 4", EMPTY, raw_bytes=4, says="raw_bytes")
    field("reserved_set", "the reserved field is 1", NORM, reserved=1, says="reserved field")
    payload("header_cut", "a payload ends in its header", NORM, lambda data: data[:20], says="header is cut")
    payload("payload_empty", "a payload of 0 bytes", NORM, lambda _: b"", says="none of gpusync's forms")
    slime = compress(bytes(nbytes))
    payload("payload_is_zstd", "a payload as xor has it", NORM, lambda _: slime, says="none of gpusync's forms")


def _write_gs01_faults(faults: Faults) -> None:
    """A GS01 payload with one fault, where another form would stand: index pairs every 1,024 bits, since k is 1."""
    before, after = (state[EMBED] for state in faults.states[:2])

    def case(name: str, what: str, bend: Callable[[Gs01], None], *, says: str) -> None:
        form = gs01(before, after, log2=22, k=1, cuts=())
        bend(form)
        faults.payload(f"gs01_{name}", f"GS01: {what}", EMBED, lambda _: form.pack(), says=says)

    def cut(data: bytes) -> Callable[[bytes], bytes]:
        return lambda _: data

    stream = lambda form: form.streams[0]  # noqa: E731
    case("index", "index positions are one too large", lambda f: setattr(stream(f), "index_shift", 1), says="index")
    case("twice", "an element in two streams", lambda f: f.streams.append(stream(f)), says="twice")
    case("v_0", "a step stream with v = 0", lambda f: setattr(stream(f), "v", 0), says="v or g")
    case("k_17", "k is 17", lambda f: setattr(stream(f), "k", 17), says="k or v")
    case("kind_2", "kind is 2", lambda f: setattr(stream(f), "kind", 2), says="kind")
    case("part", "a part behind the tensor", lambda f: setattr(stream(f), "part", 9), says="part out of range")
    case("es", "es is 4 for BF16", lambda f: setattr(f, "es", 4), says="element size")
    case("order", "order is 2", lambda f: setattr(f, "order", 2), says="order 2")
    case("log2_9", "parts of 512 elements", lambda f: setattr(f, "log2", 9), says="part size")
    case("elements", "an element more than there are", lambda f: setattr(f, "elements", f.elements + 1), says="another")
    case("reserved", "the reserved field is 1", lambda f: setattr(f, "reserved", 1), says="reserved")
    case("streams", "no streams", lambda f: f.streams.clear(), says="streams")
    case("padding", "a byte of the padding at the end is 1", lambda f: setattr(f, "end", b"\1" * 8), says="padding")
    case("outside", "a position behind the part", lambda f: stream(f).changes.append((1 << 20, 0)), says="bit count")
    sound = gs01(before, after, log2=22, k=1, cuts=()).pack()
    faults.payload("gs01_cut", "GS01: the last 8 bytes are missing", EMBED, cut(sound[:-8]), says="bytes, expected")
    faults.payload("gs01_longer", "GS01: 8 zero bytes follow", EMBED, cut(sound + bytes(8)), says="bytes, expected")
    faults.payload("gs01_head", "GS01: it ends in its head", EMBED, cut(sound[:20]), says="header is cut")


def _write_gp01_faults(faults: Faults) -> None:
    """The same as GP01."""
    before, after = (state[EMBED] for state in faults.states[:2])

    def case(name: str, what: str, bend: Callable[[Gs01], None], *, says: str) -> None:
        form = gs01(before, after, log2=22, k=1, cuts=())
        bend(form)
        faults.payload(f"gp01_{name}", f"GP01: {what}", EMBED, lambda _: form.pack_small(), says=says)

    def bent(name: str, what: str, change: Callable[[bytes], bytes], *, says: str) -> None:
        sound = gs01(before, after, log2=22, k=1, cuts=()).pack_small()
        faults.payload(f"gp01_{name}", f"GP01: {what}", EMBED, lambda _: change(sound), says=says)

    def without_values(form: Gs01) -> None:
        stream(form).v, stream(form).changes = 0, [(at, 0) for at, _ in stream(form).changes]

    stream = lambda form: form.streams[0]  # noqa: E731
    case("es", "es is 4 for BF16", lambda f: setattr(f, "es", 4), says="element size")
    case("elements", "an element more than there are", lambda f: setattr(f, "elements", f.elements + 1), says="another")
    case("log2_32", "parts of 2**32 elements", lambda f: setattr(f, "log2", 32), says="part size")
    case("streams", "no streams", lambda f: f.streams.clear(), says="number of streams")
    case("part", "a part behind the tensor", lambda f: setattr(stream(f), "part", 9), says="wrong part")
    case("k_17", "k is 17", lambda f: setattr(stream(f), "k", 17), says="k or v")
    case("v_0", "a step stream with v = 0", without_values, says="v or g")
    case("twice", "an element in two streams", lambda f: f.streams.append(stream(f)), says="twice")
    case("outside", "a position behind the part", lambda f: stream(f).changes.append((1 << 20, 0)), says="bit count")
    case("zeros", "a zero bit more is counted than stands there", lambda f: setattr(stream(f), "zeros_more", 1),
         says="last unary bit")  # fmt: skip
    case("padding_of_unary", "a bit behind the last of unary", lambda f: setattr(stream(f), "stray_unary", 1),
         says="padding")  # fmt: skip
    case("padding_of_fields", "a bit behind the last field", lambda f: setattr(stream(f), "stray_field", 1),
         says="padding")  # fmt: skip
    # Three bytes of n from 5 on, then one byte each: the number of streams, the part, its count.
    bent("number", "a number with a byte too many", lambda d: d[:8] + b"\x81\0" + d[9:], says="wrong number")
    bent("number_huge", "a number of ten bytes", lambda d: d[:5] + b"\xff" * 9 + b"\1" + d[8:], says="wrong number")
    bent("streams_8193", "more streams than there may be", lambda d: d[:8] + leb128(8193) + d[9:],
         says="number of streams")  # fmt: skip
    bent("changes", "more changes than there may be", lambda d: d[:10] + leb128(8193) + d[11:],
         says="number of changes")  # fmt: skip
    bent("cut", "the last byte is missing", lambda d: d[:-1], says="wrong length")
    bent("longer", "a zero byte follows", lambda d: d + b"\0", says="wrong length")
    bent("head", "it ends in its head", lambda d: d[:12], says="cut")


def _write_table_faults(faults: Faults) -> None:
    field, payload = faults.field, faults.payload
    first, second = faults.forms()[EMBED].frames
    sizes = [len(first), len(second)]
    shifted = [sizes[0] - 1, sizes[1] + 1]
    field("frames_more", "a frame more is counted than there is", NORM, count=2, says="number of frames")
    field("frames_less", "one frame of two is counted", EMBED, count=1, says="number of frames")
    field("frames_huge", "2**32 - 1 frames are counted", EMBED, count=2**32 - 1, says="number of frames")
    field("frame_missing", "the second frame and its size are missing", EMBED, frames=[first], says="number of frames")
    field("frame_of_nothing", "no bytes, in a frame", EMPTY, frames=[compress(b"")], says="number of frames")
    field("frame_size_huge", "a frame of 2**32 - 1 bytes", EMBED, sizes=[2**32 - 1, 8], says="larger than it can be")
    field("frame_sizes_shifted", "a frame's border is a byte too early", EMBED, sizes=shifted, says="frame 0")
    field("frames_swapped", "two frames in each other's place", EMBED, frames=[second, first], says="content size")
    field("padding_of_table", "a byte of the table's padding is 1", NORM, table_pad=b"\1", says="padding is not zero")
    field("padding_of_end", "a byte of the padding at the end is 1", BYTES, end_pad=b"\1", says="padding is not zero")
    payload("table_cut", "a payload ends in its table of frame sizes", EMBED, lambda data: data[:28], says="cut")
    payload("payload_longer", "8 zero bytes follow", NORM, lambda data: data + bytes(8), says="payload length")
    payload("payload_not_padded", "no padding at the end", BYTES, lambda data: data[:-1], says="payload length")
    payload("payload_cut", "a payload lost its last 8 bytes", NORM, lambda data: data[:-8], says="payload length")


def _write_frame_faults(faults: Faults) -> None:
    frame, data = faults.frame, faults.states[1][BYTES].data
    sound, halves = compress(data), compress(data[:100]) + compress(data[100:])
    less, more = raw_frame(data[:-1], declared=len(data)), raw_frame(data + b"\0", declared=len(data))
    bomb = endless_frame(declared=len(data), blocks=200)
    skippable = struct.pack("<II", 0x184D2A50, 4) + bytes(4)
    window = raw_frame(data, declared=len(data), window=(31 - 10) << 3)
    checked = bytearray(compress(data, write_checksum=True))
    checked[-1] ^= 1
    unsized = compress(data, write_content_size=False)
    frame("frame_cut", "a frame lost its last 3 bytes, its size fits", sound[:-3], says="frame 0")
    frame("frame_trailing_bytes", "3 bytes follow a frame within its size", sound + bytes(3), says="frame 0")
    frame("frame_twice", "a second frame follows within the first one's size", sound + sound, says="frame 0")
    frame("frame_in_halves", "two frames, of half the bytes each, stand for one", halves, says="content size")
    frame("frame_without_content_size", "a frame without content size", unsized, says="no content size")
    frame("frame_shorter", "a frame holds a byte less, and says so", compress(data[:-1]), says="content size")
    frame("frame_longer", "a frame holds a byte more, and says so", compress(data + b"\0"), says="content size")
    frame("content_size_lies_less", "a frame declares the right size and holds a byte less", less, says="frame 0")
    frame("content_size_lies_more", "a frame declares the right size and holds a byte more", more, says="frame 0")
    frame("frame_bomb", "a frame declares the right size, its 800 bytes decode to 25 MiB", bomb, says="frame 0")
    frame("frame_dictionary", "a frame asks for a dictionary",
          raw_frame(data, declared=len(data), dictionary=9), says="dictionary")  # fmt: skip
    frame("frame_window_huge", "a frame asks for a window of 2 GiB", window, says="window")
    frame("frame_skippable", "a skippable frame stands before the frame", skippable + sound, says="no zstd frame")
    frame("frame_not_zstd", "a frame is the bytes themselves", data, says="no zstd frame")
    frame("frame_empty", "a frame of 0 bytes", b"", says="no zstd frame")
    frame("frame_checksum_wrong", "zstd's own checksum of a frame is wrong", bytes(checked), says="frame 0")


def _other_digit(checksum: str | None) -> str:
    text = checksum or ""
    return text[:-1] + ("0" if text[-1] != "0" else "1")
