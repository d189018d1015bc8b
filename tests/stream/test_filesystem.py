"""The filesystem under a path is found from the mount table, and what is not known to rename atomically does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusync.stream.filesystem import filesystem_type, has_atomic_rename, is_local

TABLE = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:30 / /data rw,relatime shared:3 master:2 - nfs4 server:/export rw
31 27 0:31 / /data/bucket rw,nosuid - fuse.mountpoint-s3 mountpoint-s3 rw
32 27 0:32 / /with\\040space rw - xfs /dev/vdb rw
33 27 0:33 / /twice rw - ext4 /dev/vdc rw
34 27 0:34 / /twice rw - tmpfs tmpfs rw
a line without the dash
"""


@pytest.fixture
def mount_table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/no/such/dir", "ext4"),
        ("/data", "nfs4"),
        ("/data/stream/weight_v000001", "nfs4"),
        ("/database", "ext4"),
        ("/data/bucket/stream", "fuse.mountpoint-s3"),
        ("/data/bucket2", "nfs4"),
        ("/with space/x", "xfs"),
        ("/twice/x", "tmpfs"),
    ],
)
def test_the_longest_and_latest_mount_wins(mount_table: Path, path: str, expected: str) -> None:
    assert filesystem_type(path, mount_table=mount_table) == expected


def test_links_are_followed(tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    target.mkdir()
    other.symlink_to(target)
    table = tmp_path / "mountinfo"
    table.write_text(f"1 1 0:1 / / rw - ext4 a rw\n2 1 0:2 / {target} rw - fuse.s3fs b rw\n")
    assert filesystem_type(other / "not" / "there", mount_table=table) == "fuse.s3fs"


def test_without_a_mount_table_the_type_is_unknown(tmp_path: Path) -> None:
    assert filesystem_type("/", mount_table=tmp_path / "absent") == "unknown"


def test_the_running_system_answers() -> None:
    assert filesystem_type("/proc/self") in {"proc", "unknown"}


@pytest.mark.parametrize(
    ("fs_type", "local", "renames"),
    [
        ("ext4", True, True),
        ("xfs", True, True),
        ("overlay", True, True),
        ("tmpfs", True, True),
        ("nfs4", False, True),
        ("lustre", False, True),
        ("gpfs", False, True),
        ("cifs", False, True),
        ("fuse.mountpoint-s3", False, False),
        ("fuse.s3fs", False, False),
        ("fuse.goofys", False, False),
        ("fuse.juicefs", False, False),
        ("fuse", False, False),
        ("unknown", False, False),
        ("something_new", False, False),
    ],
)
def test_what_each_type_is_trusted_with(fs_type: str, local: bool, renames: bool) -> None:
    assert (is_local(fs_type), has_atomic_rename(fs_type)) == (local, renames)
