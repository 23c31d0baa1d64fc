"""What a look at a node takes for measured, and how it says what was looked at."""

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.node_look import judge
from resilience_sdk.health.probes import GPU
from resilience_sdk.health.runner import hung

FINE = GPU.found("answers", Status.OK, "H200", subject="GPU 0")


def test_a_device_in_order_leaves_no_node_out():
    """And says who was asked; where nobody answers, why not."""
    assert judge([FINE]) == ([], "NVML: GPU 0 in order")
    absent = GPU.found("driver", Status.UNAVAILABLE, "no NVIDIA GPU here")
    assert judge([absent]) == ([], "NVML: no NVIDIA GPU here")
    assert judge([]) == ([], "NVML: no answer")


@pytest.mark.parametrize(
    ("check", "data", "cause"),
    [
        ("ecc_uncorrected_volatile", {}, "gpu_hardware_faulty"),
        ("answers", {"cause": "gpu_fell_off_bus"}, "gpu_fell_off_bus"),
    ],
)
def test_what_the_driver_says_leaves_it_out(check, data, cause):
    """By the cause that it tells, else as hardware that is faulty."""
    found, seen = judge([FINE, GPU.found(check, Status.FAILED, "2 errors", subject="GPU 1", data=data)])
    assert [one["cause"] for one in found] == [cause]
    assert "GPU 1" in found[0]["text"]
    assert "GPU 1" in seen


def test_a_look_that_came_to_no_end_proves_nothing():
    """On a machine that is busy it is the probe that is late, not the driver."""
    late = {"cause": "gpu_gsp_timeout", "call": "nvmlDeviceGetName"}
    slow = GPU.found("answers", Status.FAILED, "GetName has not returned within 5.6 s", subject="GPU 0", data=late)
    for finding in (slow, hung(GPU, 8.0, "", " (R state)")):
        assert finding.status is Status.FAILED
        assert judge([finding])[0] == []
