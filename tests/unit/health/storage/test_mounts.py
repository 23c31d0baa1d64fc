"""Which file system holds a path, from a file in the form of /proc/self/mountinfo."""

import pytest

from resilience_sdk.health.storage.mounts import mount_of

TABLE = """22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /data rw - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /data/scratch rw - tmpfs tmpfs rw
32 22 0:42 / /my\\040models ro,relatime - lustre mds@tcp:/fs rw
33 22 0:43 / /mnt rw - ext4 /dev/vdb rw
34 33 0:44 / /mnt rw - beegfs beegfs_nodev rw
35 22 0:45 / /old rw - xfs /dev/vdc ro,norecovery
not a line
"""


@pytest.fixture
def root(machine):
    """Return the root of a machine with these mounts."""
    return machine({"/proc/self/mountinfo": TABLE})


@pytest.mark.parametrize(
    ("path", "text", "is_shared"),
    [
        ("/home/me/runs", "ext4 on /", False),
        ("/data/set", "nfs4 on /data", True),
        ("/data/../home", "ext4 on /", False),
        ("/database", "ext4 on /", False),
        ("/data/scratch/x", "tmpfs on /data/scratch", False),
        ("/my models/7b", "lustre on /my models", True),
        ("/mnt/a", "beegfs on /mnt", True),
    ],
)
def test_the_deepest_and_newest_mount_holds_a_path(root, path, text, is_shared):
    """Names that only begin alike do not count."""
    mount = mount_of(path, root)
    assert (str(mount), mount.is_shared) == (text, is_shared)


@pytest.mark.parametrize(("path", "is_read_only"), [("/", False), ("/my models", True), ("/old/x", True)])
def test_read_only_is_said_in_two_places(root, path, is_read_only):
    """Of the mount, and of the file system."""
    assert mount_of(path, root).is_read_only is is_read_only


def test_without_a_table_nothing_is_known(machine):
    """As on a platform without /proc."""
    assert mount_of("/", machine({})) is None


def test_this_machine():
    """The real file is in the form that is read."""
    assert mount_of("/proc/1/stat", "/").kind == "proc"
