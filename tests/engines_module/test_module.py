"""Plain modules and models of transformers follow a stream in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gpusync
from gpusync.engines.module import find_places, make_loader, weight_sync
from gpusync.errors import LayoutError
from gpusync.sync import WeightSync

Tensors = dict[str, torch.Tensor]


class Small(torch.nn.Module):
    """Two layers that share a weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 8, dtype=torch.bfloat16)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 12, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)


def step(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """What an optimizer does, to about a third of the elements."""
    torch.manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape) < 0.3, tensor + torch.randn(tensor.shape).to(tensor.dtype), tensor)
        for name, tensor in tensors.items()
    }


class Run:
    def __init__(self, root: Path, base: Tensors, *, like: str = "model.safetensors") -> None:
        self.root, self.tensors = root, base
        (root / "base").mkdir()
        save_file(base, root / "base" / like, metadata={"format": "pt"})
        self.publisher = gpusync.Publisher(root / "stream", base_dir=root / "base", encoding="xor")

    def follow(self, module: torch.nn.Module, **options: object) -> WeightSync:
        return weight_sync(
            module,
            base_dir=self.root / "base",
            local_checkpoint_dir=self.root / "local",
            source_dir=self.root / "stream",
            timeout=60,
            **options,
        )

    def publish(self) -> int:
        self.tensors = step(self.tensors, 7)
        return self.publisher.publish(self.tensors.items()).version


@pytest.fixture
def module() -> Small:
    torch.manual_seed(0)
    return Small()


def saved(module: torch.nn.Module, *, without: tuple[str, ...] = ()) -> Tensors:
    return {name: t.detach().clone() for name, t in module.state_dict().items() if name not in without}


def assert_equal(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(tensor.detach().view(torch.int16), expected.view(torch.int16))


def test_a_module_follows_its_checkpoint_in_place(tmp_path: Path, module: Small) -> None:
    run = Run(tmp_path, saved(module, without=("head.weight",)))
    addresses = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
    sync = run.follow(module)
    assert sync.version == 0
    for _ in range(2):
        report = sync.pull(run.publish())
        assert report.commit_path == "in place"
        for name, tensor in run.tensors.items():
            assert_equal(module.get_parameter(name) if name != "scale" else module.scale, tensor)
    assert module.head.weight is module.embed.weight
    assert addresses == {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
    assert report.bytes_by_class.get("opaque", 0) == 0
    sync.close()


class TestTiedWeights:
    @pytest.mark.parametrize("absent", ["head.weight", "embed.weight"])
    def test_saved_under_either_name_they_are_updated_once(self, tmp_path: Path, module: Small, absent: str) -> None:
        run = Run(tmp_path, saved(module, without=(absent,)))
        sync = run.follow(module)
        present = ({"head.weight", "embed.weight"} - {absent}).pop()
        sync.pull(run.publish())
        assert_equal(module.embed.weight, run.tensors[present])
        sync.close()

    def test_saved_under_both_the_first_of_the_module_counts(self, tmp_path: Path, module: Small) -> None:
        run = Run(tmp_path, saved(module))
        sync = run.follow(module)
        report = sync.pull(run.publish())  # the two differ from now on, which no tied model can hold
        assert report.commit_path == "in place"
        assert_equal(module.head.weight, run.tensors["embed.weight"])
        sync.close()


class TestNames:
    def test_a_parameter_that_the_checkpoint_does_not_have_is_named(self, module: Small) -> None:
        with pytest.raises(LayoutError) as caught:
            make_loader(module, ["embed.weight", "inner.0.weight", "scale"])
        assert caught.value.tensor == "inner.0.bias"

    def test_unless_that_is_allowed(self, module: Small) -> None:
        load = make_loader(module, ["embed.weight"], allow_missing=True)
        load([("embed.weight", torch.full((12, 8), 2.0)), ("unknown", torch.ones(1))])
        assert module.head.weight[0, 0] == 2

    def test_another_shape_is_refused_by_name(self, module: Small) -> None:
        load = make_loader(module, ["embed.weight"], allow_missing=True)
        with pytest.raises(LayoutError) as caught:
            load([("embed.weight", torch.ones(8, 12))])
        assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("embed.weight", (12, 8), (8, 12))

    @pytest.mark.parametrize(
        ("mine", "stored"), [("body.weight", "weight"), ("body.weight", "body.weight"), ("weight", "body.weight")]
    )
    def test_a_prefix_of_transformers_may_be_there_or_not(self, mine: str, stored: str) -> None:
        module = torch.nn.Module()
        module.base_model_prefix = "body"  # type: ignore[assignment]
        inner = module if "." not in mine else torch.nn.Module()
        if inner is not module:
            module.add_module("body", inner)
        inner.register_parameter("weight", torch.nn.Parameter(torch.ones(2)))
        assert find_places(module, {stored}) == {stored: mine}


class TestTransformers:
    @pytest.mark.parametrize("tied", [True, False])
    def test_a_causal_model_follows_and_computes_what_a_fresh_load_computes(self, tmp_path: Path, tied: bool) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        without = ("lm_head.weight",) if tied else ()
        run = Run(tmp_path, saved(model, without=without))
        sync = run.follow(model)
        for _ in range(2):
            assert sync.pull(run.publish()).commit_path == "in place"
        fresh = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        fresh.load_state_dict(run.tensors, strict=False)
        fresh.tie_weights()
        tokens = torch.arange(16).reshape(1, 16)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, fresh(tokens).logits)
        sync.close()
