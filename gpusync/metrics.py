"""Reports as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def report_lines(report: Mapping[str, object]) -> Iterator[str]:
    """Numbers of the last update: seconds by stage, bytes by class, and whatever else it counted in bytes."""
    for name, label in (("seconds", "stage"), ("bytes_by_class", "class")):
        values = report.get(name)
        if isinstance(values, Mapping) and values:
            yield f"# TYPE gpusync_last_{name} gauge"
            yield from (f'gpusync_last_{name}{{{label}="{each}"}} {value}' for each, value in values.items())
    for name, value in report.items():
        if name.endswith("_bytes") and isinstance(value, int):
            yield f"# TYPE gpusync_last_{name} gauge"
            yield f"gpusync_last_{name} {value}"
