"""The benchmark of publishing: what it wrote is what it says, and a delta is less than the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.scripts import run_benchmark

pytest.importorskip("torch", reason="torch is not installed")


def test_every_encoding_and_the_rival_is_published_and_followed(tmp_path: Path) -> None:
    options = ("--size=toy", "--repeats=1", "--workers=1", "--workers=2", "--json", f"--work-dir={tmp_path}")
    (report,) = json.loads(run_benchmark("bench_publish.py", *options))["reports"]
    rows = {(row["published"], row["workers"]): row for row in report["rows"]}
    for encoding in ("xor", "overwrite", "gpusync"):
        one, two = rows[encoding, 1], rows[encoding, 2]
        # Threads change no byte that is published.
        assert one["wire MB"] == pytest.approx(two["wire MB"], rel=1e-3)
        assert 0.3 < one["% of model"] < 3
        assert one["pull s"] > 0
    assert rows["gpusync", 1]["wire MB"] < rows["xor", 1]["wire MB"] < rows["overwrite", 1]["wire MB"]
    assert 100 < rows["full version", 2]["% of model"] < 101
    assert rows["rival: safetensors", 1]["of plain"] == 1
    assert any("bit for bit" in note for note in report["notes"])
    assert list(tmp_path.iterdir()) == []
