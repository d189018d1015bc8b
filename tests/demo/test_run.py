from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from gpusync.demo import run as run_module
from gpusync.demo import run_demo
from gpusync.demo.model import DecoderShape
from gpusync.demo.trainers import DecoderTrainer
from gpusync.errors import DigestMismatchError, MirrorError

SMALL = DecoderShape(vocabulary=256, hidden=64, layers=2, heads=2, kv_heads=1, feed_forward=96)


@pytest.fixture(name="small_decoder")
def _small_decoder(monkeypatch) -> None:
    monkeypatch.setattr(run_module, "DecoderTrainer", lambda **options: DecoderTrainer(**options, shape=SMALL))


@pytest.mark.usefixtures("small_decoder")
def test_every_sync_goes_through_every_encoding_and_the_table_says_what_it_cost(tmp_path):
    out = io.StringIO()
    result = run_demo(out=Console(file=out, width=160), work_dir=tmp_path / "work")
    assert [(row.sync, row.encoding) for row in result.rows] == [
        (sync, encoding) for sync in (1, 2, 3) for encoding in ("xor", "overwrite", "gpusync")
    ]
    for row in result.rows:
        assert 0 < row.elements_changed < 0.2 * result.elements
        assert 0 < row.wire_bytes < result.checkpoint_bytes
    assert len({row.elements_changed for row in result.rows}) == 3, "encodings of one step disagree on what changed"
    assert "bit for bit" in out.getvalue()
    assert f"{result.rows[0].wire_bytes:,}" in out.getvalue()
    wire = {name: sum(row.wire_bytes for row in result.rows if row.encoding == name) for name in run_module.ENCODINGS}
    best = min(wire, key=wire.__getitem__)
    saved, when = out.getvalue().partition("Saved: ")[2].split("\n", 1)
    saved = " ".join((saved + " " + when.partition("That shows")[0]).split())
    share = wire[best] / (3 * result.checkpoint_bytes)
    assert saved.startswith(f"{best} put {wire[best] / 1e6:,.1f} MB on the wire in 3 syncs")
    assert saved.endswith(f"{share:.1%} of the bytes.")
    assert "once the bytes cross a network" in " ".join(when.split())
    assert json.loads(result.as_json())["rows"][0]["encoding"] == "xor"


@pytest.mark.usefixtures("small_decoder")
def test_a_real_checkpoint_gets_noise_gradients_and_the_output_says_so(tmp_path):
    run_demo(out=Console(quiet=True), work_dir=tmp_path / "first", steps=1)
    out = io.StringIO()
    result = run_demo(
        model_dir=tmp_path / "first" / "base", out=Console(file=out, width=160), work_dir=tmp_path / "second", steps=2
    )
    assert "gradients are seeded noise" in out.getvalue()
    assert all(row.elements_changed > 0 and row.loss is None for row in result.rows)


@pytest.mark.usefixtures("small_decoder")
def test_a_wrong_pull_prints_no_table(tmp_path, monkeypatch):
    def pull_and_damage(**options):
        report = pull(**options)
        shard = next(options["local_checkpoint_dir"].glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        return report

    pull = run_module.pull
    monkeypatch.setattr(run_module, "pull", pull_and_damage)
    out = io.StringIO()
    with pytest.raises(DigestMismatchError):
        run_demo(out=Console(file=out), work_dir=tmp_path / "work")
    assert "wire bytes" not in out.getvalue()


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(MirrorError) as caught:
        run_demo(out=Console(quiet=True), work_dir=tmp_path)
    assert caught.value.path == str(tmp_path)


def test_the_demo_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import gpusync.demo.trainers, gpusync.demo.run\n"
        "from gpusync.demo.adamw import AdamWSettings\n"
        "from gpusync.demo.model import DecoderShape\n"
        "shape = DecoderShape(vocabulary=64, hidden=32, layers=1, heads=2, kv_heads=1, feed_forward=32)\n"
        "gpusync.demo.run.DecoderTrainer = lambda **o: gpusync.demo.trainers.DecoderTrainer(**o, shape=shape)\n"
        "from rich.console import Console\n"
        "gpusync.demo.run.run_demo(out=Console(), steps=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bit for bit" in done.stdout
