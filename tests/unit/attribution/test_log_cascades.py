"""What only follows, what only sounds like a cause, and what is one though hardly anything is said."""

import pytest

from resilience_sdk.attribution import diagnose
from resilience_sdk.attribution.diagnosis import read_tail

_START = "".join(f"2026-01-01 00:00:01 INFO [rank{rank}] start world_size=3\n" for rank in range(3))
_STEPS = _START + "".join(f"2026-01-01 00:00:0{n} INFO [rank0] step {n}0 loss 2.{n}\n" for n in range(2, 6))
_SIGNAL = "E0101 00:00:09.000000 77 torch/api.py:9] failed (exitcode: {}) local_rank: 1 (pid: 101) of binary: p\n"
_WATCHDOG = (
    "[rank1]:[E1120 22:30:10.61 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600011 milliseconds.\n"
)
_TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms for recv operation to complete"
)


def _raise(last, rank=0, frames=(("train.py", "main", "step()"),)):
    prefix = f"[rank{rank}]: "
    shown = "".join(
        f'{prefix}  File "/home/u/{file}", line 3, in {name}\n{prefix}    {code}\n' for file, name, code in frames
    )
    lines = "".join(f"{prefix}{line}\n" for line in last.split("\n"))
    return f"{prefix}Traceback (most recent call last):\n{shown}{lines}"


def _nccl(kind, last_error):
    return _raise(
        f"torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, {kind}, NCCL version 2.26.2\n"
        f"ncclError: Call failed.\nLast error:\n{last_error}"
    )


_REMOTE = _nccl(
    "remote process exited or there was a network error", "socketProgress: Connection closed by remote peer n3<4>"
)


# --- A: wrappers


@pytest.mark.parametrize(
    "command",
    [
        "['torchrun', '--nproc-per-node=2', 'train.py']",
        "['/opt/py/bin/python3.12', '-m', 'torch.distributed.run', 'train.py']",
        "['bash', '-c', 'accelerate launch train.py']",
        "srun python train.py",
    ],
)
def test_a_wrappers_exception_is_a_cascade(command):
    """What is beneath it counts; where nothing is, its own exit code or signal."""
    wrapper = _raise(f"subprocess.CalledProcessError: Command '{command}' returned non-zero exit status 1.")
    assert diagnose(_STEPS + _SIGNAL.format(-11) + wrapper).cause == "rank_segfault"
    assert diagnose(_STEPS + _SIGNAL.format(-9) + wrapper).cause == "rank_killed_sigkill"
    assert diagnose(_STEPS + _raise("KeyError: 'x'", 2) + wrapper).culprits[0].rank == 2
    assert diagnose(_STEPS + wrapper).cause == "unknown"
    died = _raise(f"subprocess.CalledProcessError: Command '{command}' died with <Signals.SIGSEGV: 11>.")
    assert diagnose(_STEPS + died).cause == "rank_segfault"


@pytest.mark.parametrize(
    ("how", "cause"), [("signal SIGSEGV", "rank_segfault"), ("signal SIGKILL", "rank_killed_sigkill")]
)
def test_what_spawn_tells_of_a_process_counts_where_nothing_else_does(how, cause):
    """It is all that is left of one that died without a word."""
    exited = _raise(f"torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with {how}")
    assert diagnose(_STEPS + exited).cause == cause
    assert diagnose(_STEPS + _raise("KeyError: 'x'", 1) + exited).cause == "user_code_error"


def test_another_programs_failure_is_the_users_own():
    """A compiler that fails is no wrapper's cascade."""
    failed = _raise("subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.")
    assert diagnose(_STEPS + failed).cause == "user_code_error"


# --- B: teardowns


def test_a_signal_after_nccl_gave_up_is_its_teardown():
    """At an address of nil above all; the same rank's signal, or one that nobody claims."""
    nil = "[n2:12:0:13] Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))\n"
    assert diagnose(_REMOTE + nil).cause == "nccl_remote_error"
    gave_up = "[rank1]: terminate called after throwing an instance of 'c10::DistBackendError'\n"
    gave_up += "[rank1]:   what():  NCCL is late\n"
    for code in (-6, -11):
        assert diagnose(_STEPS + _WATCHDOG + gave_up + _SIGNAL.format(code)).cause == "nccl_watchdog_timeout"


def test_a_signal_of_another_rank_before_that_is_the_cause():
    """Its peers lose it; the launcher tells of it late."""
    block = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -11 (pid: 101)\n"
    found = diagnose(_STEPS + _REMOTE + _SIGNAL.format(-11) + block)
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == ("rank_segfault", [1])


# --- C: the user's own words


@pytest.mark.parametrize(
    "words",
    [
        "STRAGGLER detected: rank 3", "rank 3 is a straggler", "slow node: 3", "node node-7 is down",
        "GPU 3 has failed", "gpu 4 fell off the bus", "GPU hang suspected", "my check: GPU 3 failed the health check",
        "nvlink link down?", "process 77 cannot be killed", "network check failed", "ECC errors uncorrectable: 3",
        "row remap pending", "CUDA error: unknown error", "gpu 3 throttled", "GSP timeout", "NODE_FAIL?",
        "no route to host",
    ],
)  # fmt: skip
def test_no_word_of_the_users_costs_a_node(words):
    """Printed, logged or raised, and whether the job fails of it or not."""
    for log in (
        f"{words}\n",
        f"[rank0]: {words}\n",
        f"2026-01-01 00:00:09 ERROR [rank0] {words}\n",
        _raise(f"RuntimeError: {words}"),
    ):
        if "CUDA error" in words and "Traceback" in log:
            continue  # CUDA raised that
        for failed in ("", _SIGNAL.format(1)):
            assert diagnose(_STEPS + log + failed).action != "exclude_node"
        found = read_tail((_STEPS + log).encode(), "log", 0)
        assert found is None or found.known.action != "exclude_node"


def test_what_systems_say_of_a_node_still_counts():
    """The same words, from the kernel, the driver, a scheduler, a tool in its own form."""
    for log, cause in (
        ("[12.5] nvlink: fatal error on link 3\n", "gpu_nvlink_error"),
        ("slurmctld: error: Nodes n3 not responding, setting DOWN\n", "node_failure"),
        ("NVRM: GPU at PCI:0000:3b:00: GSP RPC timeout\n", "gpu_gsp_timeout"),
        (
            "[INFO] Fault nodes are: []  and stragglers are: [4].\nRuntimeError: The node is a straggler and exits.\n",
            "straggler_persistent",
        ),
    ):
        found = diagnose(log)
        assert (found.cause, found.action) == (cause, "exclude_node")


# --- D: durations


def test_a_duration_longer_than_the_time_out_names_the_late_rank():
    """The watchdog's message is its victim's; who waited that long was not late."""
    said = (
        "2026-01-01 00:00:07 INFO [rank0] waited at the barrier for 700 s\n"
        "2026-01-01 00:00:07 INFO [rank1] built the index in 3.5 s\n"
        "2026-01-01 00:00:08 INFO [rank2] built the index in {}\n"
    )
    for took in ("731.2 s", "12 min", "612000 ms"):
        found = diagnose(_STEPS + said.format(took) + _WATCHDOG)
        assert (found.cause, found.action, [c.rank for c in found.culprits]) == ("hang_rank_late", "restart", [2])
    assert diagnose(_STEPS + said.format("31 s") + _WATCHDOG).cause == "nccl_watchdog_timeout"
    for whole in ("training for 3 h", "step 90 loss 2.1 took 700 s in all", "total time 9000 s"):
        said = f"2026-01-01 00:00:08 INFO [rank2] {whole}\n"
        assert diagnose(_STEPS + said + _WATCHDOG).cause == "nccl_watchdog_timeout"
    everybody = "".join(f"2026-01-01 00:00:07 INFO [rank{rank}] built the index in 800 s\n" for rank in range(3))
    assert diagnose(_STEPS + everybody + _WATCHDOG).cause == "nccl_watchdog_timeout"


# --- E, F: what NCCL met


@pytest.mark.parametrize(
    ("kind", "last_error", "cause"),
    [
        ("unhandled cuda error", "Failed to CUDA calloc async 4 bytes", "cuda_oom"),
        ("unhandled cuda error", "Failed to CUDA host alloc 8388608 bytes", "cuda_oom"),
        ("unhandled cuda error", "Cuda failure 2 'out of memory'", "cuda_oom"),
        ("internal error", "Bootstrap : no socket interface found", "environment_error"),
        ("invalid usage", "Bootstrap: no NCCL_SOCKET_IFNAME interface found", "environment_error"),
        ("invalid usage", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000", "environment_error"),
        ("unhandled cuda error", "Cuda failure 802 'system not yet initialized'", "environment_error"),
        ("internal error", "ncclSocketInit: family 9 is neither AF_INET(2) nor AF_INET6(10)", "environment_error"),
    ],
)  # fmt: skip
def test_nccls_last_error_is_the_cause(kind, last_error, cause):
    """In the exception, also an older torch's and without ranks, and where only NCCL's own warning is left of it."""
    raised = _nccl(f"{kind} (run with NCCL_DEBUG=INFO for details)", last_error)
    older = raised.replace("torch.distributed.DistBackendError", "RuntimeError").replace("[rank0]: ", "")
    for log in (raised, older):
        found = diagnose(_START + log)
        assert (found.cause, found.action) == (cause, "stop")
    found = diagnose(f"{_START}n3:77:91 [3] src.cc:185 NCCL WARN {last_error}\n{_SIGNAL.format(1)}")
    assert (found.cause, found.action) == (cause, "stop")


# --- G, J: refusals and damage, by older and newer libraries


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: http://hub/m", "user_config_error"),
        ("httpx.HTTPStatusError: Client error '403 Forbidden' for url 'http://hub/org/m'", "user_config_error"),
        ("urllib.error.HTTPError: HTTP Error 404: Not Found", "user_config_error"),
        ("OSError: org/m is not a local folder and is not a valid model identifier", "user_config_error"),
        ("OSError: You are trying to access a gated repo.\nMake sure to have access to it.", "user_config_error"),
        ("wandb.errors.UsageError: api_key not configured (no-tty)", "user_config_error"),
        ("requests.exceptions.HTTPError: 503 Server Error: Unavailable for url: http://hub/m", "external_service"),
        ("requests.exceptions.HTTPError: 429 Client Error: Too Many for url: http://hub/m", "external_service"),
        ("OSError: The archive passed at a.safetensors does not contain the valid metadata.", "checkpoint_corrupt"),
        ("ValueError: checkpoint 7 lacks any valid metadata", "checkpoint_corrupt"),
    ],
)  # fmt: skip
def test_a_refusal_is_no_outage_and_damage_no_bug(last, cause):
    """Who is refused is refused again; who is busy is not."""
    assert diagnose(_START + _raise(last)).cause == cause


# --- H: proof of a good end


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("trainer: error: unrecognized arguments: --local-rank=0", "user_config_error"),
        ("python3 -m pkg.train: error: argument --lr: invalid float value: 'x'", "user_config_error"),
        ("Error: No such option: --lerning-rate", "user_config_error"),
        ("FATAL Flags parsing error: Unknown command line flag 'foo'", "user_config_error"),
        ("/opt/job.sh: fork: Resource temporarily unavailable", "thread_exhausted"),
        ("bash: fork: retry: Resource temporarily unavailable", "thread_exhausted"),
        ("/usr/bin/python3: No module named trainer", "unknown"),
        ("./train: cannot execute binary file: Exec format error", "environment_error"),
        ("loading the model", "unknown"),
        ("it went wrong somehow", "unknown"),
    ],
)
def test_nothing_understood_is_not_fine(line, cause):
    """A failed run told as fine is the worst answer."""
    assert diagnose(f"{line}\n").cause == cause


def test_a_training_that_does_not_tell_its_end_is_not_fine():
    """It may have been killed behind its last step; a service that says something in passing is at work."""
    assert diagnose(_STEPS).cause == "unknown"
    assert diagnose(_STEPS + "training finished\n").cause == "no_fault"
    assert diagnose("[Mar 04 2023 04:10:52] [INFO] fabric manager is ready\n").cause == "no_fault"


# --- I: assertions of a kernel


@pytest.mark.parametrize("error", ["unspecified launch failure", "unknown error", "device-side assert triggered"])
def test_an_assertion_of_a_kernel_is_the_cause_whatever_cuda_says_then(error):
    """Also where the process aborts of it."""
    asserted = (
        "../cuda/Indexing.cu:1292: indexSelect: block: [12,0,0], thread: [64,0,0] Assertion `src < size` failed.\n"
    )
    what = f"terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: {error}\n"
    for then in (_raise(f"RuntimeError: CUDA error: {error}"), what + _SIGNAL.format(-6)):
        found = diagnose(_START + asserted + then)
        assert (found.cause, found.action) == ("cuda_illegal_memory_access", "restart")
    assert (
        diagnose(_START + asserted + _raise("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED")).cause
        == "cuda_illegal_memory_access"
    )


# --- chains, loggers, peers


_HANDLING = "[rank0]: \n[rank0]: During handling of the above exception, another exception occurred:\n[rank0]: \n"


def test_what_fails_while_a_failure_is_told_is_not_the_root():
    """A report, a clean-up, a peer that is waited for in `finally`."""
    first = _raise("ValueError: bad batch")
    report = _raise(
        "urllib.error.URLError: <refused>",
        frames=(("train.py", "main", "notify(error)"), ("train.py", "notify", "open(u)")),
    )
    assert diagnose(_STEPS + first + _HANDLING + report).evidence[0].text == "ValueError: bad batch"
    finish = _raise("OSError: [Errno 28] No space left on device", frames=(("train.py", "main", "wandb.finish()"),))
    assert diagnose(_STEPS + first + _HANDLING + finish).cause == "user_code_error"
    peer = _raise(_TIMED_OUT, frames=(("train.py", "main", "dist.barrier()"),))
    assert diagnose(_STEPS + first + _HANDLING + peer).evidence[0].text == "ValueError: bad batch"
    full = _raise("OSError: [Errno 28] No space left on device", frames=(("train.py", "finalize", "write(x)"),))
    tried = _raise("KeyError: 'fast'", frames=(("train.py", "finalize", "write_fast(x)"),))
    assert diagnose(_STEPS + tried + _HANDLING + full).cause == "storage_full"  # it falls back, it does not clean up
    full = full.replace("finalize", "main")
    assert diagnose(_STEPS + _raise("KeyError: 'cached'") + _HANDLING + full).cause == "storage_full"


@pytest.mark.parametrize("header", ["--- Logging error ---", "--- Logging error in Loguru Handler #1 ---"])
def test_a_loggers_own_trouble_is_not_the_root(header):
    """Neither its exception nor the one that this led to."""
    trouble = (
        f"[rank0]: {header}\n"
        + _raise("OSError: [Errno 28] No space left on device")
        + _HANDLING
        + _raise("ValueError: closed file")
    )
    found = diagnose(_STEPS + trouble + "[rank0]: Call stack:\n" + _raise("KeyError: 'labels'", 1))
    assert (found.cause, found.evidence[0].text) == ("user_code_error", "KeyError: 'labels'")


def test_a_receive_that_timed_out_is_a_peer_that_did_not_come():
    """Only where all are known to have been there is it what lies between them."""
    for direction in ("recv", "send"):
        timed_out = _raise(_TIMED_OUT.replace("recv", direction)).replace("[rank0]: ", "")
        found = diagnose(timed_out)
        assert (found.category, found.cause, found.action) == ("hang", "hang_rank_late", "restart")
    obeyed = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -15 (pid: 102)\n"
    found = diagnose(_STEPS + _raise(_TIMED_OUT) + _raise(_TIMED_OUT, 2) + _SIGNAL.format(1) + obeyed)
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == ("hang_rank_late", [1])


@pytest.mark.parametrize(
    "last",
    [
        "OSError: [Errno 28] No space left on device: '/dev/shm/pym-77-a1'",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
        "RuntimeError: unable to write to file </torch_7_2_0>: No space left on device (28)",
    ],
)
def test_no_room_in_shared_memory_is_no_full_disk(last):
    """Waiting for room on a disk would not help."""
    found = diagnose(_STEPS + _raise(last))
    assert (found.cause, found.action) == ("dataloader_shm_bus_error", "stop")
    full = diagnose(
        _STEPS + "2026-01-01 00:00:09 ERROR [rank0] sem_open: [Errno 28] No space left on device\n" + _SIGNAL.format(1)
    )
    assert full.cause == "dataloader_shm_bus_error"
