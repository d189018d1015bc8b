"""The script for GPU machines: it runs anywhere at toy size, tells where there is no device, fails on a wrong byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_check

    return gpu_check


def run(*options: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)


def test_a_dry_run_goes_through_every_operation_and_ends_in_the_table():
    done = run("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    operations = done.stdout.partition("MiB per operation on")[2]
    for operation in (
        "plain copy",
        "xor",
        "block sums",
        "sparse, 1 % of elements",
        "step planes",
        "digests of 1,024 tensors",
    ):
        (line,) = re.findall(rf"^│ {operation} +│.*$", operations, re.MULTILINE)
        assert "exact" in line
        assert ("80%" in line) == (operation in ("xor", "block sums"))
    assert re.search(r"^tests that need a device: 0 passed, 0 failed, [1-9]\d* skipped$", done.stdout, re.MULTILINE)
    assert re.search(r"^skipped: no CUDA device$", done.stdout, re.MULTILINE)
    for density in ("0.1", "1", "10"):
        for what in ("prepare, ms", "commit, ms", "verify after it, ms", "roll back, ms", "peak, MB"):
            rows = re.findall(rf"^│ (?:xor|gs01) +│ +{density} │.*│ {what} +│.*│ exact +│$", done.stdout, re.MULTILINE)
            assert len(rows) == 2
    assert "every result was exact" in done.stdout
    assert "dry run: times mean nothing" in done.stdout


def test_without_a_device_it_says_so_and_has_its_own_status():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run()
    assert done.returncode == 2
    assert "no CUDA device: nothing was checked" in done.stdout


def test_a_wrong_byte_is_told_has_no_time_and_does_not_spoil_the_next_operation(gpu_check, monkeypatch):
    operands = gpu_check.Operands(1 << 16, None)
    real = gpu_check.cases

    def damaged(o):
        for operation, work, verify in real(o):
            if operation == "copy":

                def spoil(work=work) -> None:
                    work()
                    o.dst[100] ^= 1

                yield operation, spoil, verify
            else:
                yield operation, work, verify

    monkeypatch.setattr(gpu_check, "cases", damaged)
    rows = {row["operation"]: row for row in gpu_check.check_operations(operands, repetitions=1)}
    assert str(rows["copy"]["result"]).startswith("WRONG")
    assert "GB/s" not in rows["copy"]
    assert {row["result"] for name, row in rows.items() if name != "copy"} == {"exact"}
    report = gpu_check.as_report(list(rows.values()), None, mib=1, dry_run=False)
    assert "WRONG BYTES: copy" in report.notes
    slow = {"operation": "xor", "target": "80%", "met": False, "result": "exact"}
    report = gpu_check.as_report([slow], None, mib=1, dry_run=False)
    assert report.rows[0]["target"] == "80% MISSED"
    assert "below target: xor" in report.notes


def test_what_was_skipped_or_left_out_is_told(gpu_check, tmp_path):
    path = tmp_path / "report.xml"
    skipped = '<testcase><skipped message="no cupy"/></testcase>'
    path.write_text(
        f'<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1">{skipped}</testsuite></testsuites>'
    )
    counts = gpu_check.read_counts(path, "", failed=False)
    rows = [{"operation": "xor", "result": "exact"}]
    assert "skipped: no cupy" in gpu_check.as_report(rows, counts, mib=1, dry_run=False).notes
    without = gpu_check.as_report(rows, None, mib=1, dry_run=False).notes
    assert "the tests that need a device were not run" in without


def test_a_wrong_digest_is_told(gpu_check):
    operands = gpu_check.Operands(1 << 16, None)
    _, work, verify = gpu_check.digest_case("digests", operands, [40_000, 20_000])
    work()
    verify()
    operands.bytes[50_000] ^= 1
    with pytest.raises(AssertionError, match="differs from the library's"):
        verify()


def test_predictions_are_read_from_the_table_that_has_them(gpu_check):
    text = """
| operation | configuration |
| --- | --- |
| xor | 4 warps |

| operation | registers | predicted H200, ms |
|---|---:|---:|
| `xor` | 48 | 41.9 |
| sparse, 1 % of elements | 90 | ~7 |
| chain | 40 | see below |
"""
    assert gpu_check.read_predictions(text) == {"xor": 41.9, "sparse, 1 % of elements": 7.0}
    assert gpu_check.read_predictions("") == {}


def test_every_operation_with_a_target_has_a_prediction(gpu_check):
    predictions = gpu_check.read_predictions(gpu_check.PREDICTIONS.read_text())
    assert {gpu_check.CALLED.get(operation, operation) for operation in gpu_check.TARGETS} <= set(predictions)


def test_no_test_at_all_and_no_report_are_failures(gpu_check, tmp_path):
    report = tmp_path / "report.xml"
    assert not gpu_check.read_counts(report, "broken", failed=True).fine
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}"/></testsuites>'
    for counts, failed, fine in (((3, 0, 1), False, True), ((3, 0, 3), False, False), ((3, 1, 0), True, False)):
        report.write_text(suite.format(*counts))
        assert gpu_check.read_counts(report, "", failed=failed).fine is fine
    report.write_text(suite.format(3, 0, 0))
    assert not gpu_check.read_counts(report, "interrupted", failed=True).fine
