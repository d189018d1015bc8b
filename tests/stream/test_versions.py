"""Names of version directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import ChainError, SourceReadError, VersionMissingError
from gpusync.stream import list_versions, parse_version_dir_name, version_dir_name, version_path
from gpusync.stream.limits import MAX_VERSION


@pytest.mark.parametrize(
    ("version", "name"), [(0, "weight_v000000"), (42, "weight_v000042"), (10**6, "weight_v1000000")]
)
def test_name(version: int, name: str) -> None:
    assert version_dir_name(version) == name
    assert version_path("/stream", version) == Path("/stream") / name


@given(st.integers(0, MAX_VERSION))
def test_name_round_trip(version: int) -> None:
    assert parse_version_dir_name(version_dir_name(version)) == version


@given(st.from_regex(r"weight_v[0-9]{1,14}", fullmatch=True))
def test_only_the_canonical_name_is_one(name: str) -> None:
    version = parse_version_dir_name(name)
    assert version is None or version_dir_name(version) == name


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1])
def test_number_out_of_range(version: int) -> None:
    with pytest.raises(ChainError) as caught:
        version_dir_name(version)
    assert caught.value.found == version


def test_list_is_numeric(tmp_path: Path) -> None:
    for name in ("weight_v1000000", "weight_v000010", "weight_v999999", "weight_v000009", "config.json"):
        (tmp_path / name).mkdir()
    assert list_versions(tmp_path) == [9, 10, 999999, 1000000]


def test_list_of_nothing(tmp_path: Path) -> None:
    assert list_versions(tmp_path) == []
    with pytest.raises(VersionMissingError) as caught:
        list_versions(tmp_path / "absent")
    assert caught.value.path == str(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(SourceReadError) as unreadable:
        list_versions(tmp_path / "file")
    assert unreadable.value.found == "Not a directory"
