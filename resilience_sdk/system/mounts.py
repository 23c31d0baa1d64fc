"""Mounted file systems, as the kernel lists them: nothing that is mounted is touched."""

from __future__ import annotations

import os
import re
from pathlib import Path

import attrs

from resilience_sdk.system import procfs

# Kinds that several machines see alike. Others (ext4, xfs, overlay, tmpfs) are of one machine, or cannot be told.
SHARED = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
        "fuse.mount-s3", "fuse.quobyte", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "ocfs2", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
    }
)  # fmt: skip
_OCTAL = re.compile(r"\\([0-7]{3})")


@attrs.frozen
class Mount:
    """One mounted file system. `source` is the device or the server."""

    point: str
    kind: str
    source: str
    is_read_only: bool

    @property
    def is_shared(self) -> bool:
        """Tell whether other machines see the same files."""
        return self.kind in SHARED

    def __str__(self) -> str:
        return f"{self.kind} on {self.point}"


def mount_of(path: str | os.PathLike[str], root: str) -> Mount | None:
    """Return the mount that holds an absolute path, None where that cannot be told. Does not touch the path."""
    wanted = Path(os.path.normpath(path))
    best, depth = None, 0
    for line in (procfs.text(procfs.below(root, "/proc/self/mountinfo")) or "").splitlines():
        mount = _parse(line)
        # A later mount at the same place covers an earlier one.
        if mount is not None and len(mount.point) >= depth and wanted.is_relative_to(mount.point):
            best, depth = mount, len(mount.point)
    return best


def _parse(line: str) -> Mount | None:
    """Return the mount of `id parent major:minor root point options fields... - kind source options`."""
    left, dash, right = line.partition(" - ")
    before, after = left.split(" "), right.split(" ")
    if not dash or len(before) < 6 or len(after) < 2:
        return None
    is_read_only = "ro" in before[5].split(",") or "ro" in (after[2].split(",") if len(after) > 2 else ())
    return Mount(_plain(before[4]), after[0], _plain(after[1]), is_read_only)


def _plain(text: str) -> str:
    """Return a path as it is: the kernel writes blanks as `\\040`."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
