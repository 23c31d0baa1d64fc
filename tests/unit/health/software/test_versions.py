"""Versions, read from files and never imported."""

import platform
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.software import versions

VERSION_PY = """from typing import Optional
__all__ = ['__version__', 'cuda']
__version__ = '2.5.1+cu124'
debug = False
cuda: Optional[str] = '12.4'
hip: Optional[str] = None
print("never run")
"""


def test_constants_are_read_without_running_the_module(capsys):
    """torch's version.py is generated, and holds nothing else."""
    found = versions.assigned_constants(VERSION_PY)
    assert found["__version__"] == "2.5.1+cu124"
    assert (found["cuda"], found["hip"]) == ("12.4", None)
    assert capsys.readouterr().out == ""


def test_the_installed_torch_is_read_as_it_says_itself():
    """From its files: that it is not imported is a test of the doctor."""
    said = runpy.run_path(str(Path(find_spec("torch").origin).with_name("version.py")))
    found = versions.installed_torch()
    assert (found["__version__"], found["cuda"]) == (said["__version__"], said["cuda"])


@pytest.mark.parametrize(
    ("built", "status", "words"),
    [
        ({"__version__": "2.4.0", "cuda": "12.4"}, Status.OK, "built for CUDA 12.4"),
        ({"__version__": "2.13.0+cpu", "cuda": None}, Status.OK, "built for CPU"),
        ({"__version__": "2.10.0a0", "hip": "6.2"}, Status.OK, "built for ROCm 6.2"),
        ({"__version__": "2.3.1", "cuda": "12.1"}, Status.FAILED, "2.3.1"),
        (None, Status.FAILED, "not installed"),
    ],
)
def test_torch_must_be_there_and_new_enough(built, status, words):
    """Versions are compared as numbers: 2.10 is newer than 2.4."""
    found = versions.torch_finding(built)
    assert (found.status, found.must) == (status, True)
    assert words in found.evidence
    assert bool(found.cure) is (status is Status.FAILED)


def test_nccl_is_a_package_or_inside_torch():
    """Without a GPU it does not matter."""
    (packaged,) = versions.nccl(True, {"nvidia-nccl-cu12": "2.21.5"}.get)
    assert packaged.data == {"same": {"nccl": "2.21.5"}}
    (inside,) = versions.nccl(True, {}.get)
    assert inside.status is Status.UNAVAILABLE
    assert list(versions.nccl(False, {}.get)) == []


def test_frameworks_are_told_where_they_are_installed():
    """Their checkpoints and collectives change between versions."""
    (found,) = versions.others({"accelerate": "1.2.0"}.get)
    assert found.data["same"]["accelerate"] == "1.2.0"
    assert "lightning" not in found.data["same"]


def test_python_is_this_one():
    """With its path, for environments that were activated on one node only."""
    (found,) = versions.python()
    assert found.value == platform.python_version()
    assert sys.executable in found.evidence
