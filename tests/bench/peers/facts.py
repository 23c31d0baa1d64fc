"""What docs/comparison.md says of a peer and a machine can look up in its package, without importing it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path, PurePath

import attrs

_ANY_PYTHON = (
    "--python-version=3.12",
    "--only-binary=:all:",
    *(f"--platform=manylinux{one}_x86_64" for one in ("_2_39", "_2_28", "_2_17", "2014")),
)
"""NVRx has wheels for newer Pythons than others; nothing of them is run."""


@attrs.frozen
class Fact:
    """A cell of the table, and what of the package it rests on."""

    package: str
    version: str
    column: str
    row: str
    says: str
    """What the cell begins with."""
    pattern: str
    """What is in a file of the package; for a cell that says no, in none."""
    files: str = "*.py"
    """Which files, as a pattern of `PurePath.match`."""

    @property
    def name(self) -> str:
        """Name it in results."""
        return f"{self.column}: {self.row}"

    def holds(self, files: list[Path]) -> bool:
        """Whether the files of an installed package agree."""
        words = re.compile(self.pattern)
        is_there = any(
            words.search(path.read_text(encoding="utf-8", errors="replace"))
            for path in files
            if PurePath(path).match(self.files) and path.is_file()
        )
        return is_there is not self.says.startswith("no")


_NVRX = ("nvidia-resiliency-ext", "0.7.0", "NVRx 0.7")
_TORCHFT = ("torchft", "0.2.0", "torchft 0.2")
_LM = ("lm-resiliency", "0.2.0", "LM-Resiliency 0.2")
_RAY = ("ray", "2.60.0", "Ray Train 2.60")
_TRACEML = ("traceml-ai", "0.5.0", "TraceML 0.5")
_EXPORTERS = r"import prometheus_client|from prometheus_client|from opentelemetry|import opentelemetry"

FACTS = (
    Fact(*_NVRX, "hang detection", "yes; off until", r"rank_heartbeat_timeout: Optional\[float\] = None", "config.py"),
    Fact(*_NVRX, "names the culprit of a hang, with its line", "part", r"[Mm]issing [Rr]anks", "fr_attribution.py"),
    Fact(*_NVRX, "stacks of all ranks, without ptrace", "no", r"\bfaulthandler\b"),
    Fact(*_NVRX, "hot spares", "yes", r"hot spare", "cli_args.py"),
    Fact(*_NVRX, "Prometheus, OpenTelemetry", "no", _EXPORTERS),
    Fact(*_NVRX, "goodput", "no", r"(?i)def \w*goodput"),
    Fact(*_NVRX, "Lightning", "yes (deprecated)", r"class FaultToleranceCallback", "fault_tolerance_callback.py"),
    Fact(*_TORCHFT, "training goes on while a group is lost", "yes", r"def should_commit", "manager.py"),
    Fact(*_TORCHFT, "stacks of all ranks, without ptrace", "no", r"\bfaulthandler\b"),
    Fact(*_TORCHFT, "Prometheus, OpenTelemetry", "part", r"OTLPLogExporter", "otel.py"),
    Fact(*_LM, "hang detection", "yes", r"class HangDetectionDaemon", "hang_detector.py"),
    Fact(
        *_LM, "names the culprit of a hang, with its line", "yes, no Python stack", r"culprit_rank", "hang_detector.py"
    ),
    Fact(*_LM, "stacks of all ranks, without ptrace", "no", r"\bfaulthandler\b"),
    Fact(*_LM, "replicated or in memory of peers", "yes", r"class InMemoryCkptConfig", "config.py"),
    Fact(*_LM, "Prometheus, OpenTelemetry", "no", _EXPORTERS),
    Fact(*_RAY, "hang detection", "part", r"RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "constants.py"),
    Fact(*_RAY, "stacks of all ranks, without ptrace", "part: py-spy", r'"py-spy", "dump"', "nccl_ras.py"),
    Fact(*_RAY, "restart in the job", "yes", r"max_failures: Tries to recover", "v2/api/config.py"),
    Fact(*_RAY, "training goes on while a group is lost", "part", r"class TorchftConfig", "torchft_config.py"),
    Fact(*_RAY, "SIGTERM: all ranks stop at one step", "part", r"relax_collectives_on_preemption", "v2/api/config.py"),
    Fact(*_RAY, "checkpoints in the background", "part: the upload", r"class CheckpointUploadMode", "report_config.py"),
    Fact(*_RAY, "W&B, MLflow, TensorBoard", "yes", r"def setup_wandb", "integrations/wandb.py"),
    Fact(*_TRACEML, "hang detection", "no", r"(?i)\bh[au]ng\b"),
    Fact(*_TRACEML, "restart in the job", "no", r"max.restarts"),
    Fact(*_TRACEML, "stragglers by sections on the CPU", "yes", r"(?i)straggler", "diagnostics/*/*.py"),
    Fact(*_TRACEML, "Prometheus, OpenTelemetry", "no", _EXPORTERS),
    Fact(*_TRACEML, "dashboard", "yes", r"Provides-Extra: dashboard", "METADATA"),
    Fact(*_TRACEML, "Lightning", "yes", r"lightning", "integrations/lightning.py"),
)


def installed(package: str, version: str) -> list[Path] | None:
    """Return the files of a package of this environment; None where it, or this version of it, is not there."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    return [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]


def unpacked(package: str, version: str, where: Path) -> list[Path]:
    """Return the files of a wheel of the index, which is kept unpacked in a directory."""
    folder = where / f"{package}-{version}"
    if not folder.exists():
        wheels = where / "wheels"
        words = ("download", "-q", "--no-deps", *_ANY_PYTHON, "-d", str(wheels), f"{package}=={version}")
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = wheels.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return [path for path in folder.rglob("*") if path.is_file()]


def look(where: Path) -> dict[str, bool]:
    """Return for each fact whether the package agrees."""
    files = {one: unpacked(*one, where) for one in {(fact.package, fact.version) for fact in FACTS}}
    return {fact.name: fact.holds(files[fact.package, fact.version]) for fact in FACTS}
