"""Whatever is published arrives bit for bit: any small model, any versions of it, any way of pulling them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusync import Publisher, pull
from gpusync.publish import StoredBytes
from support.checkpoints import State, Tensor, read_state, write_checkpoint
from support.receiver import receive

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "U16": 16, "I16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# Not what a full version says of itself, and not safetensors' own key.
NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name not in ("format", "__metadata__"))
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Step:
    """One version, `skip` numbers above the next one. `share` of the bytes of some tensors (`picks`: numbers, taken
    modulo how many there are) differ; a full version may bring a new tensor.
    """

    kind: str
    skip: int
    picks: tuple[int, ...]
    share: float
    seed: int
    partial: bool
    new: tuple[str, str, tuple[int, ...]] | None


@dataclass(frozen=True)
class Session:
    """One publisher, from its start to the next one's, which resumes the stream."""

    encoding: str
    checksum: str
    keep_snapshot: bool
    knows_base: bool
    shard_bytes: int
    steps: tuple[Step, ...]


def filled(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Any bit pattern: NaN payloads, -0.0 and denormals are among them."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
    return Tensor(dtype, shape, rng.integers(0, 256, nbytes, dtype=np.uint8))


@st.composite
def forms(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    if BITS[dtype] % 8:
        shape.append(8)  # whole bytes
    return dtype, tuple(shape)


@st.composite
def models(draw: st.DrawFn) -> State:
    found = draw(st.dictionaries(NAMES, forms(), max_size=5))
    rng = np.random.default_rng(draw(SEEDS))
    # A checkpoint of byte vectors only cannot be told from a delta: there is always a tensor that is none.
    found.setdefault(draw(NAMES), ("BF16", (7, 11)))
    if all(dtype == "U8" and len(shape) == 1 for dtype, shape in found.values()):
        found["weight"] = ("BF16", ())
    return {name: filled(dtype, shape, rng) for name, (dtype, shape) in found.items()}


STEPS = st.builds(
    Step,
    kind=st.sampled_from(["delta", "delta", "nothing", "full"]),
    skip=st.sampled_from([0, 0, 0, 7]),
    picks=st.lists(st.integers(0, 5), unique=True).map(tuple),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=SEEDS,
    partial=st.booleans(),
    new=st.none() | st.tuples(NAMES, forms()).map(lambda found: (found[0], *found[1])),
)
SESSIONS = st.builds(
    Session,
    encoding=st.sampled_from(["xor", "overwrite", "gpusync"]),
    checksum=st.sampled_from(["xxh3-128", "blake3", "adler32"]),
    keep_snapshot=st.booleans(),
    knows_base=st.booleans(),
    shard_bytes=st.sampled_from([1, 64, 1 << 30]),
    steps=st.lists(STEPS, min_size=1, max_size=3).map(tuple),
)


def after(state: State, step: Step) -> State:
    if step.kind == "nothing":
        return state
    rng, changed = np.random.default_rng(step.seed), dict(state)
    names = sorted(state)
    for name in {names[pick % len(names)] for pick in step.picks}:
        tensor, data = state[name], state[name].data.copy()
        if data.size:
            at = rng.integers(0, data.size, 1 + int(step.share * data.size))
            data[at] ^= rng.integers(1, 256, at.size, dtype=np.uint8)
        changed[name] = Tensor(tensor.dtype, tensor.shape, data)
    if step.kind == "full" and step.new is not None and step.new[0] not in state:
        name, dtype, shape = step.new
        changed[name] = filled(dtype, shape, rng)
    return changed


def publish(source: Path, base: Path, state: State, plan: list[Session]) -> Iterator[tuple[int, State]]:
    """Publishes what the sessions say: (version, state after it). A publisher that does not know the base can resume
    only behind a full version.
    """
    has_full = False
    for session in plan:
        publisher = Publisher(
            source,
            base_dir=base if session.knows_base or not has_full else None,
            encoding=session.encoding,
            checksum=session.checksum,
            keep_snapshot=session.keep_snapshot,
            shard_bytes=session.shard_bytes,
            workers=1,
            resume=True,
        )
        for step in session.steps:
            before, state = state, after(state, step)
            # What is not offered is unchanged, in a full version too.
            offered = [name for name in state if not step.partial or state[name] is not before.get(name)]
            offers = {name: as_offer(state[name]) for name in offered}
            send = publisher.publish_full if step.kind == "full" else publisher.publish
            yield send(offers, version=publisher.version + 1 + step.skip).version, state
            has_full = has_full or step.kind == "full"


def as_offer(tensor: Tensor) -> StoredBytes:
    return StoredBytes(dtype=tensor.dtype, shape=tensor.shape, data=tensor.data)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_version_arrives_bit_for_bit(data: st.DataObject) -> None:
    """Pulled one by one, at once, by a reader that skips some and by one that goes back; and read by a reader that
    shares nothing with us.
    """
    base = data.draw(models())
    plan = data.draw(st.lists(SESSIONS, min_size=1, max_size=3))
    window_bytes = data.draw(st.sampled_from([8, 72, 1 << 20]))  # elements are whole in a window
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpusync.mirror.change.WINDOW_BYTES", window_bytes)
        root = Path(directory)
        write_checkpoint(root / "base", base, shards=data.draw(st.integers(1, 3)))
        states = {0: base, **dict(publish(root / "stream", root / "base", base, plan))}
        seen, back = data.draw(st.sets(st.sampled_from(sorted(states)))), data.draw(st.sampled_from(sorted(states)))
        last = max(states)
        for way, targets in {
            "steps": sorted(states),
            "lagging": sorted({*seen, last}),
            "at_once": [last, back],
        }.items():
            for target in targets:
                pull(
                    local_checkpoint_dir=root / way,
                    base_dir=root / "base",
                    source_dir=root / "stream",
                    target_version=target,
                    allow_rewind=way == "at_once",
                    workers=1,
                )
                assert read_state(root / way) == states[target], (way, target)
        assert receive(base, root / "stream", last) == states[last]
