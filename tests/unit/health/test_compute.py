"""The product whose checksum is known, how fast a device makes it, and what computes where torch knows no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.health import compute
from resilience_sdk.health.compute import built_for_gpus, check, probe, slow_devices
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import Context

SIZE = 256
LARGEST = 512  # no element of these products is as large
MASK = 0xFFFFFFFF


def sign(row, column, salt):
    """Return an element of a matrix, from whole numbers alone."""
    mixed = (row * 0x9E3779B1 + column * 0x85EBCA77 + salt * 0xC2B2AE3D) & MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE3D) & MASK
    return 1 - 2 * ((mixed >> 16) & 1)


def exact_checksum(size):
    """Return the checksum of the product: (weights of rows x first) x (second x weights of columns)."""
    total = 0
    for k in range(size):
        left = sum((row % 97 + 1) * sign(row, k, 1) for row in range(size))
        right = sum((column % 89 + 1) * sign(k, column, 2) for column in range(size))
        total += left * right
    return total


@pytest.fixture(scope="module")
def product():
    """Return the right product."""
    first, second = (compute.matrix(torch, SIZE, salt, "cpu") for salt in (1, 2))
    return first.float() @ second.float()


def test_the_checksum_is_known_from_whole_numbers_alone(product):
    """No floating point had a part in it."""
    made = compute.matrix(torch, 64, 2, "cpu").tolist()
    assert made == [[sign(row, column, 2) for column in range(64)] for row in range(64)]
    assert exact_checksum(SIZE) == compute.CHECKSUMS[SIZE] == compute.checksum(torch, product)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_type_gives_the_same(name):
    """Each element is even and below 512, so even bfloat16 holds it."""
    first, second = (compute.matrix(torch, SIZE, salt, "cpu").to(getattr(torch, name)) for salt in (1, 2))
    made = first @ second
    assert made.abs().max() < LARGEST
    assert compute.checksum(torch, made) == compute.CHECKSUMS[SIZE]


@pytest.mark.slow
def test_the_checksums_of_all_sizes():
    """Of the largest without its product: weights x first, second x weights."""
    for size, known in compute.CHECKSUMS.items():
        first, second = (compute.matrix(torch, size, salt, "cpu") for salt in (1, 2))
        places = torch.arange(size)
        assert int(((places % 97 + 1) @ first) @ (second @ (places % 89 + 1))) == known


@settings(max_examples=8, deadline=None)
@given(
    row=st.integers(0, SIZE - 1), column=st.integers(0, SIZE - 1), by=st.sampled_from([-256.0, -2.0, 2.0, 64.0, 1024.0])
)
def test_one_wrong_element_is_seen(product, row, column, by):
    """Wherever it is, and however little it is off."""
    broken = product.clone()
    broken[row, column] += by
    assert compute.checksum(torch, broken) != compute.CHECKSUMS[SIZE]


def test_a_device_that_is_not_there_cannot_compute():
    """As one that was lost answers."""
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    (found,) = check(torch, "cuda:0")
    assert found.stops
    assert "CUDA" in found.evidence


class WrongTorch:
    """torch on a device that gets one element of each product wrong: a silent fault, as the compute check must see."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def arange(self, *args, **kwargs):
        return torch.arange(*args, **kwargs).as_subclass(WrongTensor)


class WrongTensor(torch.Tensor):
    """A tensor whose products are off by two in one place."""

    def __matmul__(self, other):
        made = torch.Tensor(self.as_subclass(torch.Tensor).float()) @ other.as_subclass(torch.Tensor).float()
        if made.dim() == 2:
            made[7, 7] += 2
        return made


def test_a_device_that_computes_wrongly_stops_the_job(monkeypatch):
    """It would train on, and nobody would know."""
    monkeypatch.setattr(compute, "SIZES", {"cpu": SIZE})
    monkeypatch.setattr(compute, "_TIMED_S", 0.001)
    result, _ = check(WrongTorch(), "cpu")
    assert result.stops
    assert "instead of" in result.evidence
    assert "leave this node out" in result.cure


def speed(device, **flops):
    """Return what is said of the speed of a device."""
    return Finding(probe="compute", check="compute_speed", subject=device, status=Status.OK, data={"flops": flops})


def test_the_slow_one_of_several_is_named():
    """In any type: a worn tensor core shows in one of them."""
    fast = [speed(f"cuda:{n}", float32=50e12, bfloat16=600e12 + n) for n in range(7)]
    slow = speed("cuda:7", float32=50e12, bfloat16=500e12)
    found = {finding.subject: finding for finding in slow_devices([*fast, slow])}
    assert {subject for subject, finding in found.items() if finding.status is not Status.OK} == {"cuda:7"}
    assert "bfloat16" in found["cuda:7"].evidence


@given(st.lists(st.floats(0.95, 1.0), min_size=1, max_size=16))
def test_equal_devices_are_not_slow(speeds):
    """Five percent are no fault, and one alone has no neighbours."""
    found = slow_devices([speed(f"cuda:{n}", float32=1e12 * share) for n, share in enumerate(speeds)])
    assert all(finding.status is Status.OK for finding in found)


@pytest.mark.parametrize("data", [{}, {"flops": 3}, {"flops": {"float32": "fast"}}])
def test_a_report_that_tells_no_speed_is_not_judged(data):
    """It may come from another version, or from anywhere."""
    odd = Finding(probe="compute", check="compute_speed", subject="other cuda:0", status=Status.OK, data=data)
    assert slow_devices([speed("cuda:0", float32=1e12), odd])[1] == odd


@pytest.mark.skipif(built_for_gpus(torch), reason="this torch was built for GPUs")
def test_the_gpus_of_the_machine_do_not_matter_to_a_torch_for_the_processor():
    """The processor computes once, in the place of the first of them."""
    (other,) = probe(Context(only="cuda:1"))
    assert (other.status, other.evidence) == (Status.UNAVAILABLE, "torch is built for the processor alone")
    computed, speed = probe(Context(only="cuda:0"))
    assert (computed.status, computed.subject, speed.check) == (Status.OK, "cpu", "compute_speed")
