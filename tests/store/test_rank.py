"""One rank's live weights: after a commit they are what a fresh load would give, after a roll-back what they were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from gpusync.codec import Gs01Steps, MemoryPayload, encode_gf01, encode_gs01, encode_overwrite, encode_xor, open_delta
from gpusync.digest import digest_of
from gpusync.errors import DigestMismatchError, Where
from gpusync.layout import attach, named_tensors, trace
from gpusync.store.casts import CastStore
from gpusync.store.compact import CompactWriter, StepFiles
from gpusync.store.memory import HostMemory
from gpusync.store.operations import BlobSteps, MovedBytes, OverwriteWords, PlaneSteps, XorWords
from gpusync.store.preparing import Windows
from gpusync.store.rank import RankStore
from gpusync.store.tensor_update import TensorUpdate
from gpusync.store.update import PreparedUpdate
from gpusync.stream import element_bytes, is_float_order
from gpusync_kernels.segments import Rows
from support.models import ModelConfig, TinyModel, fresh_load, make_state, reader_of, specs_of, tensor_bytes
from support.models_apply import assert_same
from support.models_layers import Ranks

ALONE = Ranks()
FORMS = ["xor", "overwrite", "gf01 xor", "gf01 steps", "gf01 planes", "gf01 full", "gs01", "gp01"]


def changed(state: Mapping[str, torch.Tensor], seed: int, *, share: float = 0.05) -> dict[str, torch.Tensor]:
    """The next state: a share of the elements of every tensor moves by a few units in the last place."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, tensor in state.items():
        data = tensor_bytes(tensor).view(f"u{tensor.element_size()}")
        if data.size:
            at = np.unique(rng.integers(0, data.size, max(1, int(data.size * share))))
            data[at] ^= rng.integers(1, 4, at.size).astype(data.dtype)
        after[name] = torch.from_numpy(data.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)
    return after


def encode(form: str, old: np.ndarray, new: np.ndarray, dtype: str) -> bytes | None:
    if form == "xor":
        return encode_xor(old, new)
    if form == "overwrite":
        return encode_overwrite(old, new)
    if form == "gs01":
        return encode_gs01(old, new, element_bytes=element_bytes(dtype), float_order=is_float_order(dtype))
    if form == "gp01":
        steps = Gs01Steps(old, new, element_bytes=element_bytes(dtype), float_order=is_float_order(dtype))
        return steps.encode() if steps.changed else None
    transform = {"gf01 xor": 0, "gf01 steps": 1, "gf01 planes": 2, "gf01 full": 3}[form]
    return encode_gf01(
        old if transform < 2 else None,
        new,
        transform=transform,
        element_bytes=element_bytes(dtype),
        float_order=is_float_order(dtype),
    )


class Rank:
    """A serving rank of the tiny model, and the chain it is brought along."""

    def __init__(self, config: ModelConfig, state: Mapping[str, torch.Tensor], **options: int) -> None:
        self.config, self.state = config, dict(state)
        self.specs = specs_of(self.state)
        twin = TinyModel(config, ALONE)
        layout = trace(twin, twin.load_weights, self.specs)
        self.model = fresh_load(config, ALONE, self.state)
        self.params = named_tensors(self.model)
        layout, demotions = attach(layout, self.params)
        assert demotions == []
        memory = HostMemory()
        casts = CastStore(layout, self.params, memory=memory)
        casts.fill(reader_of(self.state))
        self.store = RankStore(layout, self.params, memory=memory, casts=casts, **options)

    def update(self, path: Path, chain: list[tuple[str, dict[str, torch.Tensor]]], **wrong: str) -> tuple:
        """The chain's steps of every tensor, decoded into a compact file."""
        writer = CompactWriter(path)
        updates, before = {}, self.state
        for form, after in chain:
            for name, spec in self.specs.items():
                old, new = tensor_bytes(before[name]), tensor_bytes(after[name])
                payload = encode(form, old, new, spec.dtype)
                if payload is None or np.array_equal(old, new):
                    continue
                stored = MemoryPayload(payload)
                decoder = open_delta(
                    stored,
                    encoding="gpusync" if form[0] == "g" else form,
                    nbytes=spec.nbytes,
                    element_bytes=element_bytes(spec.dtype),
                    float_order=is_float_order(spec.dtype),
                )
                step = writer.add(decoder, nbytes=spec.nbytes, element_bytes=element_bytes(spec.dtype))
                earlier = updates[name].steps if name in updates else ()
                updates[name] = TensorUpdate(
                    nbytes=spec.nbytes,
                    steps=(*earlier, step),
                    algorithm="xxh3-128",
                    checksum=wrong.get(name.replace(".", "_"), digest_of("xxh3-128", new)),
                    where=Where(tensor=name, version=1),
                )
            before = after
        writer.close()
        return updates, StepFiles(path)

    def goes_and_comes_back(self, prepared: PreparedUpdate, state: Mapping[str, torch.Tensor]) -> None:
        """After the commit the params are those of a fresh load of `state`, after a roll-back what they were."""
        before = self.live()
        self.store.commit(prepared)
        assert self.store.verify(prepared) is None
        self.model.post_load()
        assert_same(self.model, fresh_load(self.config, ALONE, state))
        self.store.roll_back(prepared)
        assert self.live() == before

    def live(self) -> dict[str, bytes]:
        return {name: tensor_bytes(tensor).tobytes() for name, tensor in self.params.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_commit_equals_a_fresh_load_and_roll_back_the_old_one(tmp_path: Path, form: str, tied: bool) -> None:
    config = ModelConfig(tied=tied)
    state = make_state(config)
    after = changed(state, 1)
    if tied:
        after["lm_head.weight"] = after["embed.weight"]
    rank = Rank(config, state)
    addresses = {name: tensor.data_ptr() for name, tensor in rank.params.items()}
    before = rank.live()
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", [(form, after)]))
    assert rank.live() == before
    rank.goes_and_comes_back(prepared, after)
    assert {name: tensor.data_ptr() for name, tensor in rank.params.items()} == addresses


class Base:
    """The old version, as the mirror of the host has it."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.reader = reader_of(state)


def mixed_chain(state: Mapping[str, torch.Tensor]) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """A version of every form, upon each other."""
    chain, at = [], dict(state)
    for number, form in enumerate([*FORMS, "xor", "overwrite", "gs01"]):
        at = changed(at, number)
        chain.append((form, at))
    return chain


# Room for nothing, for less than most tensors, for some of them, for all: tensors go through in windows, or together.
@pytest.mark.parametrize("staging_bytes", [1, 3000, 20_000, 1 << 30])
@pytest.mark.parametrize("has_base", [False, True])
def test_a_chain_of_every_form_in_one_commit(tmp_path: Path, staging_bytes: int, has_base: bool) -> None:
    config = ModelConfig()
    state = make_state(config)
    chain = mixed_chain(state)
    rank = Rank(config, state, staging_bytes=staging_bytes)
    base = Base(state) if has_base else None
    before = rank.live()
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", chain), base=base)
    assert (prepared.kept == []) == has_base
    assert (prepared.streamed_bytes > 0) == (staging_bytes < 1 << 30)
    assert rank.live() == before
    rank.goes_and_comes_back(prepared, chain[-1][1])


def test_a_window_of_prepare_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the digest has seen is what the commit is compared with."""
    made: dict[str, int] = {}
    take = Windows.take

    def counted(windows: Windows, rows: Rows) -> object:
        made[windows.name] = made.get(windows.name, 0) + int((rows["rows"] * rows["row_bytes"]).sum())
        return take(windows, rows)

    monkeypatch.setattr(Windows, "take", counted)
    config = ModelConfig()
    state = make_state(config)
    rank = Rank(config, state, staging_bytes=1)
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", [("xor", changed(state, 1))]))
    assert made
    assert made == {name: int(rank.store.sizes([name])[0]) for name in made}
    assert sum(part.live.table.nbytes for part in prepared.expected) == prepared.touched_bytes


def test_lanes_beside_each_other_do_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusync.store.rank.LANES_FROM_BYTES", 0)
    monkeypatch.setattr(HostMemory, "pause_workers", 3)
    config = ModelConfig()
    state = make_state(config)
    rank, chain = Rank(config, state), mixed_chain(state)
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", chain), base=Base(state))
    assert len(prepared.lanes) == 3
    rank.goes_and_comes_back(prepared, chain[-1][1])


@pytest.mark.parametrize("staging_bytes", [1, 1 << 30])
def test_a_commit_that_fails_anywhere_is_undone(
    tmp_path: Path, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call fails after it has written some of its bytes: the n-th, for every n."""
    config = ModelConfig()
    state = make_state(config)
    rank = Rank(config, state, staging_bytes=staging_bytes)
    chain, at = [], state
    for number, form in enumerate(["gs01", "overwrite", "gf01 planes", "gf01 steps"]):
        at = changed(at, number)
        chain.append((form, at))
    base, before = Base(state), rank.live()
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", chain), base=base)
    failures = 0
    while True:
        with monkeypatch.context() as patch:
            calls = Failing(after=failures)
            for kind in (XorWords, OverwriteWords, BlobSteps, PlaneSteps, MovedBytes):
                patch.setattr(kind, "apply", calls.wrap(kind.apply))
            try:
                rank.store.commit(prepared)
            except MemoryError:
                failures += 1
            else:
                break
        rank.store.roll_back(prepared)
        assert rank.live() == before
    assert failures >= 4
    assert rank.store.verify(prepared) is None


class Failing:
    """The call number `after` does its work and then fails."""

    def __init__(self, after: int) -> None:
        self.left = after

    def wrap(self, real):
        def apply(operation) -> None:
            real(operation)
            self.left -= 1
            if self.left < 0:
                raise MemoryError("no memory left")

        return apply


@pytest.mark.parametrize("staging_bytes", [1, 1 << 30])
@pytest.mark.parametrize("form", ["xor", "gs01", "gf01 full"])
def test_a_flipped_live_bit_is_repaired_from_the_mirror(tmp_path: Path, staging_bytes: int, form: str) -> None:
    config = ModelConfig()
    state = make_state(config)
    after = changed(state, 1)
    rank = Rank(config, state, staging_bytes=staging_bytes)
    good, base = rank.live(), Base(state)
    rank.params["proj.weight"].view(torch.int16)[0, 0] ^= 64
    damaged = rank.live()
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", [(form, after)]), base=base)
    assert prepared.repaired == ([] if form == "gf01 full" else ["proj.weight"])
    assert rank.live() == damaged
    rank.store.commit(prepared)
    assert rank.store.verify(prepared) is None
    rank.model.post_load()
    assert_same(rank.model, fresh_load(config, ALONE, after))
    rank.store.roll_back(prepared)
    assert rank.live() == good


def test_a_bad_delta_is_not_taken_for_a_flipped_bit(tmp_path: Path) -> None:
    rank = Rank(ModelConfig(), make_state(ModelConfig()))
    update = rank.update(tmp_path / "compact", [("xor", changed(rank.state, 1))], proj_weight="0" * 32)
    before = rank.live()
    with pytest.raises(DigestMismatchError) as caught:
        rank.store.prepare(*update, base=Base(rank.state))
    assert caught.value.tensor == "proj.weight"
    assert rank.live() == before


def test_scratch_is_halved_until_there_is_memory_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(ModelConfig(), make_state(ModelConfig()), staging_bytes=16 << 20)
    real, most = rank.store.memory.empty, 3 << 20

    def empty(nbytes: int) -> np.ndarray:
        if nbytes > most:
            raise MemoryError(f"{nbytes} bytes")
        return real(nbytes)

    monkeypatch.setattr(rank.store.memory, "empty", empty)
    updates, _ = rank.update(tmp_path / "compact", [("xor", changed(rank.state, 1))])
    rank.store.held_by_any = dict.fromkeys(rank.store.held_by_any, 8 << 20)
    assert rank.store.reserve(updates) == 2 << 20
    most = 1000
    with pytest.raises(MemoryError):
        rank.store.reserve(updates)


def test_one_commit_after_another(tmp_path: Path) -> None:
    config = ModelConfig()
    rank = Rank(config, make_state(config))
    for number, form in enumerate(FORMS):
        after = changed(rank.state, number)
        prepared = rank.store.prepare(*rank.update(tmp_path / form, [(form, after)]))
        rank.store.commit(prepared)
        assert rank.store.verify(prepared) is None
        rank.state = after
    rank.model.post_load()
    assert_same(rank.model, fresh_load(config, ALONE, rank.state))


@pytest.mark.parametrize("name", ["proj_weight", "layers_1_router_bias_weight", "layers_0_cache_scale_weight"])
def test_a_wrong_checksum_changes_nothing(tmp_path: Path, name: str) -> None:
    config = ModelConfig()
    rank = Rank(config, make_state(config))
    before = rank.live()
    updates = rank.update(tmp_path / "compact", [("xor", changed(rank.state, 1))], **{name: "0" * 32})
    with pytest.raises(DigestMismatchError) as caught:
        rank.store.prepare(*updates)
    assert str(caught.value.tensor).replace(".", "_") == name
    assert rank.live() == before


def test_a_bit_that_flips_live_after_prepare_is_seen_by_verify(tmp_path: Path) -> None:
    config = ModelConfig()
    rank = Rank(config, make_state(config))
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", [("xor", changed(rank.state, 1))]))
    rank.params["proj.weight"].view(torch.int16)[0, 0] ^= 1
    rank.store.commit(prepared)
    assert rank.store.verify(prepared) == "proj.weight"
