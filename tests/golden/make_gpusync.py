"""Writes the golden vectors in `gpusync/`: streams in our own format, valid ones and such with one fault each.

`python tests/golden/make_gpusync.py` writes them anew, `--out DIR` elsewhere, to compare. See gpusync/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from gpusync_faults import Faults, write_faults
from gpusync_format import (
    DTYPES,
    FULL,
    FULL_PLANES,
    STEP_PLANES,
    XOR,
    Gs01,
    Seeded,
    State,
    Tensor,
    Version,
    compress,
    delta,
    encode_shard,
    full,
    gf01,
    gs01,
    read_checkpoint,
    slime_payload,
    write,
)

HERE = Path(__file__).resolve().parent
VECTORS_BASE = HERE / "vectors" / "base"
FRAME = 1 << 16
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json")

# Nothing, one element, odd sizes; then a frame and a byte, one element less than a frame, planes that end in the midst
# of frames, whole frames, and more than one frame of 1 MiB (24 bytes, so that elements of every width are whole).
FORMS = {
    "empty.bf16": ("BF16", (0, 3)), "empty.f64": ("F64", (0,)),
    "one.bool": ("BOOL", ()), "one.i16": ("I16", (1,)), "one.f32": ("F32", ()), "one.i64": ("I64", (1, 1)),
    "odd.u8": ("U8", (255,)), "odd.f8": ("F8_E4M3", (7, 19)), "odd.e8m0": ("F8_E8M0", (33,)), "odd.f4": ("F4", (3, 22)),
    "odd.i16": ("I16", (63,)), "odd.bf16": ("BF16", (31, 3)), "odd.f16": ("F16", (129,)),
    "odd.u32": ("U32", (33,)), "odd.f32": ("F32", (5, 13)), "odd.c64": ("C64", (17,)),
    "odd.i64": ("I64", (13,)), "odd.f64": ("F64", (3, 7)),
    "frames.i8": ("I8", (FRAME + 1,)), "frames.f16": ("F16", (FRAME // 2 - 1,)),
    "frames.bf16": ("BF16", (3 * FRAME // 2 + 2053,)), "frames.f32": ("F32", (2, FRAME // 4)),
    "frames.f64": ("F64", (3 * FRAME // 8 + 513,)), "frames.large": ("BF16", ((1 << 19) + 12,)),
}  # fmt: skip
# Of sparse steps: part sizes, low bits of gaps (few: many index pairs), and how classes share streams.
STREAMS: list[dict[str, Any]] = [
    {"log2": 10, "k": 2, "cuts": (1, 4)}, {"log2": 22, "k": 5, "cuts": ()},
    {"log2": 31, "k": 16, "cuts": (1, 2, 3, 5, 8, 13)}, {"log2": 12, "k": 4, "cuts": (7,), "order": 0},
]  # fmt: skip
# Tensors of the shared base: every dtype it has, no bytes, scalars, odd sizes, NaN payloads, the largest.
CHANGED = [
    "model.embed_tokens.weight", "model.flag", "model.scale", "model.one_i8", "model.step", "model.layers.0.gate",
    "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.experts.3.w1.weight", "special.bf16_nan",
    "special.f32", "edge.f16_1024", "edge.i8_241", "層.0.重み", "🦙.weight",
]  # fmt: skip


def changed(state: State, names: Sequence[str], seed: str, *, share: float = 0.01) -> State:
    """The next state: in each named tensor a few elements change, at least one."""
    seeded, after = Seeded(seed), dict(state)
    for name in names:
        tensor = state[name]
        bits, _, _ = DTYPES[tensor.dtype]
        width = max(1, bits // 8)
        words = np.frombuffer(tensor.data, np.uint8).reshape(-1, width).copy()
        if len(words):
            at = seeded.positions(1 + min(16, int(share * len(words))), len(words))
            columns = np.frombuffer(seeded.bytes(len(at)), np.uint8) % width
            words[at, columns] ^= 1 if tensor.dtype == "BOOL" else 0x15
        after[name] = tensor.with_data(words.tobytes())
    return after


def forms_base() -> State:
    """Large tensors repeat a few elements, so that they are small when they are compressed."""
    seeded, state = Seeded("forms base"), {}
    for name, (dtype, shape) in FORMS.items():
        nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype][0] // 8
        pattern = seeded.bytes(min(nbytes, 88) if name.startswith("frames") else nbytes)
        data = (pattern * (nbytes // max(1, len(pattern)) + 1))[:nbytes]
        state[name] = Tensor(dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data)
    return state


def write_forms(out: Path) -> None:
    """Each transform in frames of 64 KiB and of 1 MiB, then all of them mixed, with every order that `order` can say:
    a decoder obeys what is written, and these transforms do not depend on it.
    """
    base = forms_base()
    write(out / "base" / "config.json", b'{"model_type": "forms"}\n')
    shard = encode_shard([(name, t.dtype, t.shape, t.data) for name, t in base.items()], {"format": "pt"})
    write(out / "base" / "model.safetensors.zst", compress(shard))
    kinds = [(transform, log2) for log2 in (16, 20) for transform in (XOR, FULL_PLANES, FULL)]
    states, versions = [base], []
    for number, (transform, log2) in enumerate(kinds, start=1):
        states.append(changed(states[-1], list(base), f"forms {number}"))
        old, new = states[-2:]
        payloads = {name: gf01(old[name], new[name], transform=transform, log2=log2).pack() for name in base}
        # A header that is no multiple of 8: no payload is aligned.
        versions.append(delta(number, old, new, payloads, shards=1 + number % 2, shift=(0, 3, 1, 4)[number % 4]))
    number = len(kinds) + 1
    states.append(changed(states[-1], list(base), f"forms {number}"))
    old, new = states[-2:]
    payloads = {}
    for at, name in enumerate(base):
        transform = (XOR, FULL_PLANES, FULL)[at % 3]
        options = {"log2": 17 + at % 3, "order": at // 3 % 2, "write_checksum": True}
        payloads[name] = gf01(old[name], new[name], transform=transform, **options).pack()
    versions.append(delta(number, old, new, payloads))
    what = (
        "v1 xor, v2 full planes, v3 full in frames of 64 KiB; v4, v5, v6 the same in frames of 1 MiB; v7 all of them "
        "in frames of 128 to 512 KiB with zstd's own checksums, order 0 and 1 by turns; every version has every tensor"
    )
    write_stream(
        out / "streams" / "gf01_forms",
        what,
        "../../base",
        versions,
        {number: (states[number], {"config.json": b'{"model_type": "forms"}\n'}) for number in range(1, len(states))},
    )


def write_steps(out: Path) -> None:
    """GS01 and step planes over the base of `gf01_forms`."""
    base = forms_base()
    states, versions = [base], []
    for number, how in enumerate(STREAMS, start=1):
        states.append(changed(states[-1], [name for name in base if base[name].data], f"steps {number}", share=0.1))
        payloads = {name: form.pack() for name, form in sparse(*states[-2:], how).items()}
        versions.append(delta(number, *states[-2:], payloads, shards=1 + number % 2, shift=(0, 3)[number % 2]))
    for number, log2 in enumerate((16, 20), start=len(STREAMS) + 1):
        states.append(changed(states[-1], list(base), f"steps {number}"))
        old, new = states[-2:]
        payloads = {
            name: gf01(old[name], new[name], transform=STEP_PLANES, log2=log2, order=at % 2).pack()
            for at, name in enumerate(base)
        }
        versions.append(delta(number, old, new, payloads))
    what = (
        "v1 to v4 GS01: parts of 2**10, 2**22, 2**31, 2**12 elements, v4 with order 0 for all; v5, v6 GF01 step planes "
        "in frames of 64 KiB and 1 MiB, with both orders by turns"
    )
    files = {"config.json": b'{"model_type": "forms"}\n'}
    after = {number: (states[number], files) for number in range(1, len(states))}
    write_stream(out / "streams" / "steps", what, "../../base", versions, after)


def write_packed(out: Path) -> None:
    """GP01 over the base of `gf01_forms`."""
    base = forms_base()
    states, versions = [base], []
    for number, how in enumerate(STREAMS, start=1):
        states.append(changed(states[-1], [name for name in base if base[name].data], f"packed {number}", share=0.1))
        payloads = {name: form.pack_small() for name, form in sparse(*states[-2:], how).items()}
        versions.append(delta(number, *states[-2:], payloads, shards=1 + number % 2, shift=(0, 3)[number % 2]))
    what = "v1 to v4 GP01: parts of 2**10, 2**22, 2**31, 2**12 elements, v4 with order 0 for all"
    files = {"config.json": b'{"model_type": "forms"}\n'}
    after = {number: (states[number], files) for number in range(1, len(states))}
    write_stream(out / "streams" / "packed", what, "../../base", versions, after)


def sparse(old: State, new: State, how: dict[str, Any]) -> dict[str, Gs01]:
    """The steps of every tensor that changes, in streams as `how` says."""
    found = {}
    for name in new:
        cuts = tuple(cut for cut in how["cuts"] if cut < (8 if DTYPES[new[name].dtype][1] == 1 else 15))
        if new[name] != old[name]:
            found[name] = gs01(old[name], new[name], **{**how, "cuts": cuts})
    return found


def write_mixed(out: Path) -> None:
    """All that our publisher writes, one after the other."""
    base = read_checkpoint(VECTORS_BASE)
    side = side_files()
    states = {0: base}
    states[1] = changed(base, CHANGED, "mixed 1")
    states[2] = changed(states[1], CHANGED[::2], "mixed 2", share=0.2)
    # A full version may drop tensors; these would take 130 KB.
    states[3] = changed({name: states[2][name] for name in CHANGED[1:]}, CHANGED[3::2], "mixed 3")
    states[3]["model.layers.2.new.weight"] = Tensor("BF16", (21, 3), Seeded("mixed new").bytes(126))
    states[4] = changed(states[3], [*CHANGED[1::3], "model.layers.2.new.weight"], "mixed 4")
    states[5] = changed(states[4], CHANGED[2::2], "mixed 5", share=0.1)
    states[6] = states[5]
    new_config = {"config.json": b'{"model_type": "tiny", "revision": 3}\n'}
    versions = [
        ours(1, states, checksum="xxh3-128", shards=3),
        slimes(2, states, "xor", checksum="blake3"),
        full(3, dict(sorted(states[3].items())), shards=2, side_files=new_config),
        ours(4, states, checksum="adler32"),
        slimes(5, states, "overwrite", checksum="xxh3-128", shards=2),
        ours(6, states, checksum="xxh3-128"),
    ]
    what = (
        "v1 gpusync, v2 xor, v3 full (far fewer tensors, one of them new, and a new config.json), v4 gpusync, "
        "v5 overwrite, v6 gpusync with nothing changed; every version with stream_id, shard_bytes, payload_checksums"
    )
    files = {number: side if number < 3 else {**side, **new_config} for number in range(1, 7)}
    write_stream(
        out / "streams" / "mixed",
        what,
        "../../../vectors/base",
        versions,
        {number: (states[number], files[number]) for number in range(1, 7)},
    )


def write_without_faults(out: Path, faults: Faults) -> None:
    """What every case in `bad/` is, but for its fault."""
    what = "v1 as the cases in bad/ have it, without a fault"
    after = {1: (faults.states[1], side_files())}
    versions = [faults.sound()]
    write_stream(out / "streams" / "without_faults", what, "../../../vectors/base", versions, after)


def side_files() -> dict[str, bytes]:
    """Those of the shared base."""
    return {name: (VECTORS_BASE / name).read_bytes() for name in SIDE_FILES}


def ours(number: int, states: dict[int, State], **options: object) -> Version:
    """Transforms by turns; full planes and full only where that is small."""
    old, new, payloads = states[number - 1], states[number], {}
    for at, name in enumerate(name for name in new if new[name] != old[name]):
        transform = (FULL_PLANES, XOR, FULL)[at % 3] if len(new[name].data) < 3000 else XOR
        payloads[name] = gf01(old[name], new[name], transform=transform).pack()
    return delta(number, old, new, payloads, **options)


def slimes(number: int, states: dict[int, State], encoding: str, **options: object) -> Version:
    old, new = states[number - 1], states[number]
    names = [name for name in new if new[name] != old[name]]
    payloads = {name: slime_payload(old[name], new[name], encoding) for name in names}
    return delta(number, old, new, payloads, encoding=encoding, **options)


def write_stream(
    directory: Path, what: str, base: str, versions: Sequence[Version], after: dict[int, tuple[State, dict[str, bytes]]]
) -> None:
    for version in versions:
        version.write(directory)
    told = {
        str(number): {
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
            "tensors": {name: described(tensor) for name, tensor in state.items()},
        }
        for number, (state, files) in after.items()
    }
    head = {"what": what, "base": base, "source": ".", "columns": ["dtype and shape", "xxh3-128", "sha256"]}
    write(directory / "expected.json", _line_by_line({**head, "versions": told}).encode())


def _line_by_line(value: object, depth: int = 4) -> str:
    """JSON with a line for each tensor."""
    if not isinstance(value, dict) or not depth:
        return json.dumps(value, ensure_ascii=False)
    lines = [f"{json.dumps(key, ensure_ascii=False)}: {_line_by_line(of, depth - 1)}" for key, of in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def described(tensor: Tensor) -> list[str]:
    shape = ",".join(map(str, tensor.shape))
    digests = [xxhash.xxh3_128(tensor.data).hexdigest(), hashlib.sha256(tensor.data).hexdigest()]
    return [f"{tensor.dtype}[{shape}]", *digests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "gpusync")
    out = parser.parse_args().out
    for name in ("base", "streams", "bad"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_forms(out)
    write_steps(out)
    write_packed(out)
    write_mixed(out)
    faults = Faults(out / "bad", read_checkpoint(VECTORS_BASE))
    write_without_faults(out, faults)
    write_faults(faults)


if __name__ == "__main__":
    main()
