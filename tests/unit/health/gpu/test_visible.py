"""Which GPUs are a job's, by `CUDA_VISIBLE_DEVICES` as CUDA reads it."""

import pytest

from resilience_sdk.health.gpu.visible import Choice, Gpu, choose, cuda_devices, entries, old_mig_parent

NODE = [Gpu(number, f"GPU-{number}{number}aa", "H100") for number in range(4)]


def chosen(value, gpus=NODE, **more):
    """Return the choice of a job with that value."""
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value, **more}
    return choose(env, gpus, {"MIG-7": "GPU-22aa"})


@pytest.mark.parametrize(
    ("value", "indices", "devices"),
    [
        (None, (0, 1, 2, 3), 4),
        ("", (), 0),
        ("-1", (), 0),
        ("NoDevFiles", (), 0),
        ("3, 1", (1, 3), 2),
        ("0,-1,2", (0,), 1),
        ("1,1", (), 0),  # CUDA then has no device at all
        ("GPU-22,GPU-00aa", (0, 2), 2),
        ("MIG-7,MIG-8", (2,), 1),
    ],
)
def test_what_is_visible(value, indices, devices):
    """In whatever order they are named."""
    assert chosen(value).indices == indices
    assert cuda_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, 4) == devices


def test_what_names_nothing_ends_the_list():
    """For CUDA, too; a GPU that does not tell its name may be the one that is meant."""
    assert chosen("0,4,1") == Choice((0,), missing="4")
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "0,4,1"}, 4) == 1
    assert chosen("GPU-2,GPU-9") == Choice((2,), missing="GPU-9")
    assert chosen("GPU-2,GPU-9", [*NODE[:3], Gpu(3)]) == Choice((2, 3), missing="GPU-9")
    assert chosen("MIG-7") == Choice((2,), {2: "MIG-7"})


def test_numbers_count_what_the_process_may_open():
    """A scheduler hides the GPUs of other jobs."""
    gpus = [Gpu(0, denied=True), NODE[1], Gpu(2, denied=True), NODE[3]]
    assert chosen("0,1", gpus) == Choice((1, 3))
    assert chosen("1", gpus) == Choice((3,))


def test_several_models():
    """Their order is CUDA's secret, unless it is by their place on the bus, or all are visible."""
    gpus = [Gpu(0, "GPU-a", "T400"), *NODE[1:]]
    assert chosen("0", gpus) == Choice((0, 1, 2, 3), sure=False)
    assert chosen("0", gpus, CUDA_DEVICE_ORDER="PCI_BUS_ID") == Choice((0,))
    assert chosen("3,2,1,0", gpus) == Choice((0, 1, 2, 3))
    assert chosen("GPU-a", gpus) == Choice((0,))


def test_the_older_name_of_an_instance_has_its_gpu():
    """The newer one has to be looked up."""
    assert old_mig_parent("MIG-GPU-22aa/1/0") == "GPU-22aa"
    assert old_mig_parent("MIG-7") == ""
    assert entries({"CUDA_VISIBLE_DEVICES": "MIG-GPU-22aa/1/0"}) == ["MIG-GPU-22aa/1/0"]
