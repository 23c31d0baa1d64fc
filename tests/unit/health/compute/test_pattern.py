"""The product whose checksum is known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.health.compute import pattern, probe
from resilience_sdk.health.compute.probe import PROBE, check, slow_devices
from resilience_sdk.health.findings import Finding, Status

SIZE = 256


@pytest.fixture(scope="module")
def product():
    """Return the right product."""
    first, second = (pattern.matrix(torch, SIZE, salt, "cpu") for salt in (1, 2))
    return first.float() @ second.float()


def test_matrices_are_what_whole_numbers_say():
    """The same elements, one by one and all at once."""
    for salt in (1, 2):
        made = pattern.matrix(torch, 64, salt, "cpu").tolist()
        assert made == [[pattern.sign(row, column, salt) for column in range(64)] for row in range(64)]


def test_the_checksum_is_known_from_whole_numbers_alone(product):
    """No floating point had a part in it."""
    assert pattern.exact_checksum(SIZE) == pattern.CHECKSUMS[SIZE] == pattern.checksum(torch, product)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_type_gives_the_same(name):
    """Each element is even and below 512, so even bfloat16 holds it."""
    kind = getattr(torch, name)
    first, second = (pattern.matrix(torch, SIZE, salt, "cpu") for salt in (1, 2))
    made = first.to(kind) @ second.to(kind)
    assert made.abs().max() < pattern.LARGEST
    assert pattern.checksum(torch, made) == pattern.CHECKSUMS[SIZE]


@pytest.mark.slow
def test_the_checksums_of_all_sizes():
    """Of the largest without its product: weights x first, second x weights."""
    for size, known in pattern.CHECKSUMS.items():
        first, second = (pattern.matrix(torch, size, salt, "cpu") for salt in (1, 2))
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
    assert pattern.checksum(torch, broken) != pattern.CHECKSUMS[SIZE]


@pytest.mark.slow
def test_this_processor_computes_right():
    """And says how fast."""
    result, speed = check(torch, "cpu")
    assert (result.status, result.must) == (Status.OK, True)
    assert speed.value > 0


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
    monkeypatch.setattr(probe, "SIZES", {"cpu": SIZE})
    monkeypatch.setattr(probe, "_TIMED_S", 0.001)
    result, _ = check(WrongTorch(), "cpu")
    assert result.stops
    assert "instead of" in result.evidence
    assert "leave this node out" in result.cure


def speed(device, **flops):
    """Return what is said of the speed of a device."""
    return Finding(probe=PROBE, check="compute_speed", subject=device, status=Status.OK, data={"flops": flops})


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
    odd = Finding(probe=PROBE, check="compute_speed", subject="other cuda:0", status=Status.OK, data=data)
    assert slow_devices([speed("cuda:0", float32=1e12), odd])[1] == odd
