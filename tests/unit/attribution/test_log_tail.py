"""The end of a rank's log and the kernel's messages, as evidence about a death."""

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.diagnosis import MOST_BYTES, KernelFindings, read_kernel, read_tail

TERMINATE = (
    b"terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access\n"
)
OOM = "Memory cgroup out of memory: Killed process 71 (python) total-vm:9kB, anon-rss:1kB"
XID = "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_the_last_words_of_a_rank_are_quoted_with_the_cause():
    """However much came before them."""
    found = read_tail(b"step 1 loss 2.0\n" * 100_000 + TERMINATE, "log of rank 1", 1)
    assert (found.known.cause, found.known.symptom) == ("cuda_illegal_memory_access", False)
    assert found.ranks == {1}
    quoted = found.known.evidence[0]
    assert quoted.source == "log of rank 1"
    assert "illegal memory access" in quoted.text


def test_a_log_of_lost_peers_is_a_symptom_and_a_quiet_one_nothing():
    """The rank that only complains is a victim."""
    lost = b"RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:33411\n"
    assert read_tail(lost, "log", 0).known.symptom
    assert read_tail(b"", "log", 0) is None
    assert read_tail(b"step 1\nstep 2\n", "log", 0) is None


@given(st.binary(max_size=3000))
def test_no_bytes_make_it_fail(data):
    """What a job writes is anything."""
    read_tail(data, "log", 0)
    read_tail(data * 20, "log")
    assert MOST_BYTES >= 20 * 3000


def test_the_kernel_speaks_of_processes_and_of_the_node():
    """A kill for memory is of the process that it names, a lost GPU of the node; the rest is no proof."""
    found = read_kernel([OOM, XID, "bridge: port 1(host0) entered disabled state"], [71, 72], oom_seen=None)
    assert [told.cause for told in found.processes[71]] == ["host_oom_kill"]
    assert [told.cause for told in found.node] == ["gpu_fell_off_bus"]
    assert found.node[0].evidence[0].source == "kernel"


def test_a_kill_of_a_foreign_process_counts_only_where_our_group_counted_one():
    """Inside a container the kernel's numbers are others than ours."""
    assert read_kernel([OOM], [5], oom_seen=None).node == ()
    assert read_kernel([OOM], [5], oom_seen=False).node == ()
    assert [told.cause for told in read_kernel([OOM], [5], oom_seen=True).node] == ["host_oom_kill"]


def test_a_line_that_names_nobody_makes_no_kill_of_ours():
    """`invoked oom-killer` names who asked for memory: of a kill of somebody else that is not the node's fault."""
    lines = [
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        OOM,
        "oom_reaper: reaped process 71 (python), now anon-rss:0kB",
    ]
    assert read_kernel(lines, [5], oom_seen=None).node == ()
    assert read_kernel(lines, [5], oom_seen=False).node == ()
    assert list(read_kernel(lines, [71], oom_seen=None).processes) == [71]


OF_DEVICE = "NVRM: Xid (PCI:0000:17:00): 79, pid=4711, name=python, GPU has fallen off the bus."
OF_PROGRAM = "NVRM: Xid (PCI:0000:17:00): {}, pid={}, name=python, Ch 00000008, intr 00000000. MMU Fault"


def test_an_xid_of_a_program_is_of_the_rank_of_that_process_alone():
    """Of another process it is nobody's here: neighbours on a shared machine have bugs of their own."""
    for number in (13, 31):
        assert read_kernel([OF_PROGRAM.format(number, 4711)], [71], oom_seen=None) == KernelFindings()
        found = read_kernel([OF_PROGRAM.format(number, 71)], [71, 72], oom_seen=None)
        assert (list(found.processes), found.node) == ([71], ())
    for number in (43, 45):  # what follows from another one
        assert read_kernel([OF_PROGRAM.format(number, 71)], [71], oom_seen=None) == KernelFindings()


def test_an_xid_of_a_device_concerns_every_rank_whomever_it_names():
    """The driver names the process that it met; what the GPU is, it is for all."""
    for pids in ([71], [4711, 71]):
        found = read_kernel([OF_DEVICE], pids, oom_seen=None)
        assert [told.cause for told in found.node] == ["gpu_fell_off_bus"]
        assert all(told.measured for told in found.node)
