"""What is installed: Python, torch and what it was built for, NCCL, the SDK. Nothing of it is imported."""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from resilience_sdk._version import __version__
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "software"
LEAST_TORCH = (2, 4)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
# Frameworks whose collectives or checkpoints change between versions, where they are installed.
_FRAMEWORKS = ("lightning", "pytorch-lightning", "accelerate", "transformers", "deepspeed", "megatron-core", "numpy")


def python() -> Iterator[Finding]:
    """Yield the interpreter."""
    version = platform.python_version()
    yield Finding(
        probe=PROBE,
        check="python",
        status=Status.OK,
        value=version,
        evidence=f"{platform.python_implementation()} {version}, {sys.executable}",
        data={"same": {"python": version}},
    )


def torch_finding(built: Mapping[str, Any] | None) -> Finding:
    """Return what is said of an installed torch, given the names in its `version.py`; None: there is none. Pure."""
    least = ".".join(map(str, LEAST_TORCH))
    if built is None:
        return Finding(
            probe=PROBE,
            check="torch",
            status=Status.FAILED,
            threshold=least,
            evidence="not installed for this interpreter",
            cure=f"`{sys.executable} -m pip install torch`, or activate the environment that has it",
            must=True,
        )
    version = str(built.get("__version__", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    cuda = built.get("cuda") or built.get("hip")
    device = f"for {'CUDA' if built.get('cuda') else 'ROCm'} {cuda}" if cuda else "for CPU"
    return judged(
        probe=PROBE,
        check="torch",
        status=Status.OK if numbers >= LEAST_TORCH else Status.FAILED,
        value=version,
        threshold=least,
        evidence=f"{version}, built {device}",
        cure=f"`pip install 'torch>={least}'`",
        must=True,
        data={"same": {"torch": version, "cuda": cuda}},
    )


def installed_torch() -> dict[str, Any] | None:
    """Return what torch's `version.py` says, None where there is no torch. Reads files, imports nothing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return assigned_constants(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {"__version__": _version_of("torch") or ""}


def assigned_constants(source: str) -> dict[str, Any]:
    """Return the constants that a module assigns at its top level, by name, without running it."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: node.value.value for target in targets if isinstance(target, ast.Name)})
    return found


def nccl(has_gpus: bool, version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield the NCCL that torch brought along; nothing where there is neither a GPU nor NCCL."""
    version = next((found for name in _NCCL_PACKAGES if (found := version_of(name))), None)
    if version is not None:
        same = {"same": {"nccl": version}}
        yield Finding(probe=PROBE, check="nccl", status=Status.OK, value=version, evidence=version, data=same)
    elif has_gpus:
        yield Finding(
            probe=PROBE,
            check="nccl",
            status=Status.UNAVAILABLE,
            evidence="no package of its own: torch holds one, whose version torch.cuda.nccl.version() tells",
        )


def others(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield the SDK and the frameworks."""
    versions = {"resilience-sdk": __version__}
    versions.update({name: version for name in _FRAMEWORKS if (version := version_of(name))})
    yield Finding(
        probe=PROBE,
        check="packages",
        status=Status.OK,
        value=__version__,
        evidence=", ".join(f"{name} {version}" for name, version in versions.items()),
        data={"same": versions},
    )


def probe(has_gpus: bool) -> Iterator[Finding]:
    """Yield all versions."""
    yield from python()
    yield torch_finding(installed_torch())
    yield from nccl(has_gpus, _version_of)
    yield from others(_version_of)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
