"""What one line means: every sign reads its own example, advice means nothing, numbers decide for Xids."""

import pytest

from resilience_sdk.attribution.log_scan import has_trouble
from resilience_sdk.attribution.log_signs import ROLES, read_line, signs, without_advice, xid_causes
from resilience_sdk.attribution.taxonomy import causes


@pytest.mark.parametrize("sign", signs(), ids=lambda sign: f"{sign.cause}-{sign.role}-{sign.confidence}")
def test_every_sign_reads_its_own_example(sign):
    """No sign is shadowed by another, and the scan would not have passed its example by."""
    found = read_line(sign.example)
    assert found is not None
    assert (found.cause, found.role, found.confidence) == (sign.cause, sign.role, sign.confidence)
    assert sign.cause in causes()
    assert sign.role in ROLES
    assert 0 < sign.confidence < 1
    assert sign.source
    assert has_trouble(sign.example)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (13, "cuda_illegal_memory_access"),
        (31, "cuda_illegal_memory_access"),
        (48, "gpu_ecc_uncorrectable"),
        (63, "gpu_row_remap_pending"),
        (64, "gpu_row_remap_failure"),
        (74, "gpu_nvlink_error"),
        (79, "gpu_fell_off_bus"),
        (95, "gpu_ecc_uncorrectable"),
        (119, "gpu_gsp_timeout"),
        (145, "gpu_nvlink_error"),
        (43, None),
        (45, None),
        (92, None),
    ],
)
def test_an_xid_is_read_by_its_number(number, cause):
    """The kernel's line carries the number; those that only follow another fault, or only count, mean nothing."""
    found = read_line(f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=77, name=python3, words that do not matter")
    assert (found and found.cause) == cause
    assert set(xid_causes().values()) <= set(causes())


def test_a_recovery_action_counts_unless_it_is_none():
    """Xid 154 is the driver's own judgement."""
    line = "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x{} to 0x{}"
    needed = read_line(line.format("0 (None)", "2 (Node Reboot Required)"))
    assert needed is not None
    assert needed.cause == "gpu_hardware_faulty"
    assert read_line(line.format("2 (Node Reboot Required)", "0 (None)")) is None


@pytest.mark.parametrize(
    "advice",
    [
        "This may be caused by insufficient shared memory (shm).",
        "CUDA kernel errors might be asynchronously reported at some other API call.",
        "x.py:3: UserWarning: reading failed: Input/output error",
        "Hint: No space left on device is a common reason for that",
        "Please check that no other process has the port: address already in use",
    ],
)
def test_advice_names_causes_that_nobody_saw(advice):
    """A sentence on what might be is not a report of what was."""
    assert read_line(advice) is None


def test_what_stands_beside_advice_counts():
    """Only the sentences that advise are left out."""
    line = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. Please check your memory."
    assert without_advice(line) == "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
    found = read_line(line)
    assert found is not None
    assert found.cause == "dataloader_worker_killed"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0", "network_ib_unreachable"),
        ("NET/IB : Got completion from peer 10.2.0.5<33092> with error 5, opcode 0, len 0", "nccl_remote_error"),
        (
            "NET/IB: Got completion from peer 10.2.0.5<3> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0",
            "network_ib_unreachable",
        ),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-01-01T00:00:00 ***", "slurm_cancelled"),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***",
            "slurm_time_limit",
        ),
        ("Fault nodes are: []  and stragglers are: [1].", "straggler_persistent"),
        ("Fault nodes are: []  and stragglers are: [].", None),
        ("step 30 loss nan grad 0.1", "nan_loss"),
        ("iteration 7 | lm loss: 2.3 | number of nan iterations:   0 |", None),
        ("val_loss improved from inf to 0.41", None),
        ("0 errors, 0 failed", None),
    ],
)
def test_small_differences_that_matter(line, cause):
    """Lines that look alike and mean other things, or nothing."""
    found = read_line(line)
    assert (found and found.cause) == cause
