"""What cannot be meant on the command line is refused before anything grows."""

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.bounds import (
    check_endpoint,
    check_master_address,
    check_room,
    room_for_ranks,
    split_endpoint,
)

GIB = 1 << 20  # in KiB


@pytest.fixture
def machine(tmp_path):
    """Return what makes the files of a machine, with the limits that are given."""

    def make(memory=64 * GIB, pid_max=4 << 20, threads_max=1 << 20, pids_max="max", above="max"):
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "sys/kernel").mkdir(parents=True)
        (proc / "self").mkdir()
        (proc / "meminfo").write_text(f"MemTotal: {memory} kB\nMemFree: 1 kB\nSwapTotal: 0 kB\n")
        (proc / "sys/kernel/pid_max").write_text(f"{pid_max}\n")
        (proc / "sys/kernel/threads-max").write_text(f"{threads_max}\n")
        (proc / "self/cgroup").write_text("0::/pod/job\n")
        (cgroups / "pod/job").mkdir(parents=True)
        (cgroups / "pod/job/pids.max").write_text(f"{pids_max}\n")
        (cgroups / "pod/pids.max").write_text(f"{above}\n")
        return room_for_ranks(proc, cgroups)

    return make


def test_a_laptop_of_two_cores_holds_128_ranks(machine):
    """Processors are no bound: tests run many ranks on few."""
    assert machine(memory=4 * GIB)[0] >= 128


@pytest.mark.parametrize(
    ("limits", "most", "why"),
    [
        ({"memory": 8 * GIB}, 1024, "8 GiB"),
        ({"pid_max": 3000}, 1000, "kernel.pid_max is 3000"),
        ({"threads_max": 600}, 200, "kernel.threads-max is 600"),
        ({"pids_max": 1024}, 341, "pids.max is 1024"),
        ({"pids_max": 1024, "above": 512}, 170, "pids.max is 512"),
    ],
)
def test_the_smallest_limit_counts_and_is_named(machine, limits, most, why):
    """Of memory, of the kernel, and of the control groups above the launcher."""
    found, told = machine(**limits)
    assert found <= most  # a limit of the user who runs the tests may be smaller
    assert found < most or why in told


def test_nothing_known_still_has_an_end(tmp_path):
    """On a machine without /proc so many are a mistake, too."""
    assert 1 <= room_for_ranks(tmp_path, tmp_path)[0] <= 65536


def test_a_number_of_ranks_beyond_it_is_refused_with_its_cure():
    """The message names the option, the value, the limit and what to do."""
    check_room("128", 128, (128, "so"))
    with pytest.raises(ConfigError, match=r"--nproc-per-node 99999999: .* at most for 128 \(so\); give a smaller"):
        check_room("99999999", 99999999, (128, "so"))


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("node1", ("node1", None)),
        ("node1:29400", ("node1", "29400")),
        ("node1:", ("node1", "")),
        ("[::1]:29400", ("::1", "29400")),
        ("[fe80::1]", ("fe80::1", None)),
        ("fe80::1", ("fe80::1", None)),
        (":29400", ("", "29400")),
        ("[::1]29400", ("::1", "29400")),
    ],
)
def test_an_endpoint_has_a_host_and_perhaps_a_port(endpoint, parts):
    """As torch reads it, with addresses of IPv6."""
    assert split_endpoint(endpoint) == parts


@pytest.mark.parametrize("endpoint", ["", "node1", "node1:0", "node1:65535", "[::1]:29400", "fe80::1"])
def test_a_sound_endpoint_passes(endpoint):
    """Also none, and on one node any port."""
    check_endpoint(endpoint, several=False)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("localhost:abc", "port of 0 to 65535, such as localhost:29500"),
        ("localhost:70000", "port of 0 to 65535"),
        ("localhost:-1", "port of 0 to 65535"),
        ("localhost:", "port of 0 to 65535"),
        ("localhost:\u0663", "port of 0 to 65535"),
        (":29400", "no host"),
        ("[::1]:x", "such as [::1]:29500"),
        ("node1:0", "cannot meet at port 0"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(endpoint, why):
    """Before torch is asked, whose errors do not say which option they are of."""
    with pytest.raises(ConfigError) as refused:
        check_endpoint(endpoint, several=True)
    assert f"--rdzv-endpoint {endpoint!r}" in str(refused.value)
    assert why in str(refused.value)


def test_a_port_in_the_master_address_is_refused():
    """Torch would look that up as a name, for minutes."""
    check_master_address("fe80::1")
    check_master_address("node1")
    with pytest.raises(ConfigError, match="--master-addr node1 --master-port 29500"):
        check_master_address("node1:abc")
