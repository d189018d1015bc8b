"""Which filesystem a path is on, and what that filesystem can be trusted with.

Read from the kernel's mount table, never probed: a probe would have to write, and on an object store a probe that
succeeds proves nothing about the next file.
"""

from __future__ import annotations

import os
from pathlib import Path

MOUNT_TABLE = "/proc/self/mountinfo"
UNKNOWN_TYPE = "unknown"

_LOCAL = "ext2 ext3 ext4 xfs btrfs zfs bcachefs f2fs jfs reiserfs tmpfs ramfs rootfs overlay aufs fuseblk"
LOCAL_TYPES = frozenset(_LOCAL.split())
# Network filesystems with POSIX rename. Everything that is not listed, FUSE above all, counts as an object store.
_NETWORK = "nfs nfs3 nfs4 lustre gpfs beegfs ceph cifs smb3 9p virtiofs wekafs panfs ocfs2 gfs2 orangefs"
NETWORK_POSIX_TYPES = frozenset(_NETWORK.split())


def filesystem_type(path: str | os.PathLike[str], *, mount_table: str | os.PathLike[str] = MOUNT_TABLE) -> str:
    """The kernel's name of the filesystem `path` is on or would be created on ("ext4", "nfs4", "fuse.s3fs" ...).

    Links are followed; `path` need not exist. "unknown" where there is no mount table to read (other systems).
    """
    try:
        table = Path(mount_table).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return UNKNOWN_TYPE
    resolved = os.path.realpath(path)
    best, best_type = -1, UNKNOWN_TYPE
    for line in table.splitlines():
        mount_point, fs_type = _parse_mount(line)
        # >=: of two mounts at the same place the later one is the one that is seen
        if _is_within(resolved, mount_point) and len(mount_point) >= best:
            best, best_type = len(mount_point), fs_type
    return best_type


def is_local(fs_type: str) -> bool:
    """True if files live on this host: durable after fsync, with atomic rename and working locks."""
    return fs_type in LOCAL_TYPES


def has_atomic_rename(fs_type: str) -> bool:
    """True if a rename there is known to be atomic for other hosts too. FUSE mounts and unknown types: False."""
    return fs_type in LOCAL_TYPES or fs_type in NETWORK_POSIX_TYPES


def _parse_mount(line: str) -> tuple[str, str]:
    """`36 35 98:0 /root /mount/point rw - ext4 ...`: the fields before the lone dash vary in number."""
    before, dash, after = line.partition(" - ")
    fields, described = before.split(" "), after.split(" ")
    if not dash or len(fields) < 5:
        return "", UNKNOWN_TYPE
    return _unescape(fields[4]), described[0]


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as three octal digits."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _is_within(path: str, mount_point: str) -> bool:
    if not mount_point:
        return False
    return path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
