"""The package of NVIDIA's name: found on its path alone, with the original's names, and words where it has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.core.settings.nvrx import provided_directory
from resilience_sdk.errors import ConfigError

ROOT = Path(__file__).parents[3]


def python(code: str, *path: Path) -> str:
    """Return what a program prints whose PYTHONPATH has these."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    return done.stdout + done.stderr


def test_it_is_not_there_without_its_directory():
    """Nobody who installs the SDK finds another one's package."""
    assert "No module named 'nvidia_resiliency_ext'" in python("import nvidia_resiliency_ext")


def test_the_names_of_the_original_are_ours():
    """In whichever submodule they are looked for; each class is one."""
    code = """
from nvidia_resiliency_ext.fault_tolerance import (
    FaultToleranceConfig, RankMonitorClient, RankMonitorClientError, WorkloadAction, WorkloadControlRequest)
from nvidia_resiliency_ext.fault_tolerance.data import HeartbeatTimeouts, SectionTimeouts
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig as again
import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
from nvidia_resiliency_ext import straggler
from nvidia_resiliency_ext.straggler import CallableId, Detector, Report, Statistic, StragglerId
from nvidia_resiliency_ext.attribution.straggler import Detector as newer
from nvidia_resiliency_ext.straggler.reporting import Report as reporting
from nvidia_resiliency_ext.ptl_resiliency import (
    FaultToleranceCallback, SimulatedFaultParams, StragglerDetectionCallback)
assert FaultToleranceConfig is again is fault_tolerance.FaultToleranceConfig
import nvidia_resiliency_ext
assert nvidia_resiliency_ext.__version__ == "0.4.1"
assert Detector is newer is straggler.Detector
assert Report is reporting
import sys
print(RankMonitorClient.__module__, "torch" in sys.modules)
"""
    assert python(code, provided_directory("")) == "resilience_sdk.adapters.nvrx.client False\n"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("checkpointing", "Checkpointer"),
        ("checkpointing.async_ckpt.torch_ckpt", "Checkpointer"),
        ("checkpointing.local.basic_state_dict", "Checkpointer"),
        ("ptl_resiliency.local_checkpoint_callback", "Checkpointer"),
        ("inprocess", "resilience run"),
        ("inprocess.wrap", "resilience run"),
        ("attribution.trace_analyzer", "resilience why"),
        ("shared_utils.health_check", "resilience doctor"),
    ],
)
def test_what_has_no_counterpart_says_what_to_use(name, instead):
    """As an ImportError, which frameworks that can do without it catch; in both forms of the statement."""
    parent, _, last = f"nvidia_resiliency_ext.{name}".rpartition(".")
    for statement in (f"import {parent}.{last}", f"from {parent} import {last}"):
        said = python(f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)", provided_directory(""))
        assert "is not provided by resilience_sdk" in said
        assert instead in said


def test_another_one_beside_it_is_refused(monkeypatch, tmp_path):
    """A package without a file of its own, as the original is, or with one."""
    package = tmp_path / "nvidia_resiliency_ext"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for file in (None, package / "__init__.py"):
        if file is not None:
            file.touch()
        with pytest.raises(ConfigError, match=r"--provide-nvrx.*is installed, in .*nvidia_resiliency_ext"):
            provided_directory("--provide-nvrx")


def test_ours_is_no_other_one(monkeypatch):
    """A launcher inside of a rank finds what its own launcher has provided."""
    monkeypatch.syspath_prepend(provided_directory(""))
    assert (provided_directory("") / "bin" / "ft_launcher").stat().st_mode & 0o111


def test_its_launcher_restarts_nothing_unless_somebody_says_so(tmp_path):
    """0 restarts are its default and no option, so that a file and the environment count as they do elsewhere."""
    resilience = tmp_path / "resilience"
    resilience.write_text('#!/bin/sh\necho "$PET_MAX_RESTARTS" "$@"\n')
    resilience.chmod(0o755)
    script, env = provided_directory("") / "bin" / "ft_launcher", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for more, expected in (({}, "0"), ({"PET_MAX_RESTARTS": "2"}, "2")):
        done = subprocess.run([script, "a b", "c"], env=env | more, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{expected} run --provide-nvrx a b c\n"


def test_its_launcher_says_where_the_sdk_is_missing(tmp_path):
    """Its directory may be on PATH without the environment that the SDK is installed in."""
    python3 = tmp_path / "python3"
    python3.write_text("#!/bin/sh\nexit 1\n")  # one without the SDK
    python3.chmod(0o755)
    script = provided_directory("") / "bin" / "ft_launcher"
    done = subprocess.run([script, "x.py"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "activate the environment" in done.stderr
