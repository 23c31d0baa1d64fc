"""Reaching the driver: what can be said of a node before any of its GPUs is asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu.rules import found
from resilience_sdk.health.gpu.visible import ORDER, VISIBLE, Choice, entries

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


def connect(root: str) -> tuple[Any, Finding | None]:
    """Return (the binding with NVML initialised, None), or (None, why there is nothing to ask).

    May hang in the driver. `root` stands before /sys.
    """
    try:
        import pynvml
    except ImportError as error:
        cure = "pip install nvidia-ml-py"
        return None, found("driver", "", Status.UNAVAILABLE, evidence=f"{error}; {cure}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, judge_no_driver(error, pci_gpus(root))
    return pynvml, None


def judge_no_driver(error: Exception, pci: list[str]) -> Finding:
    """Judge why NVML cannot be had; `pci` are the NVIDIA GPUs that the PCI bus shows.

    A node without GPUs is well without a driver. A container that was given none sees the host's on the bus.
    """
    code = codes.code_of(error)
    seen = f"the PCI bus shows {len(pci)} NVIDIA GPU{'s'[: len(pci) != 1]} ({', '.join(pci[:8])})"
    if code == codes.LIBRARY_NOT_FOUND:
        evidence = "no NVIDIA driver (libnvidia-ml.so.1 is not there)"
        if pci:
            evidence += f", though {seen}: install the driver, or give this container the GPUs (`--gpus all`)"
        return found("driver", "", Status.UNAVAILABLE, evidence=evidence)
    if code == codes.DRIVER_NOT_LOADED and not pci:
        return found("driver", "", Status.UNAVAILABLE, evidence="no NVIDIA GPU on this node")
    said, cause = codes.meaning(error)
    evidence = f"NVML cannot start: {said}" + (f"; {seen}" if pci else "")
    return found("driver", "", Status.FAILED, evidence=evidence, data={"cause": cause})


def describe(nvml: Any, root: str) -> tuple[int, Finding]:
    """Return how many GPUs NVML has, and the finding with all versions. Raises NVMLError."""
    gpus: int = nvml.nvmlDeviceGetCount()
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    versions = {
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "nvml": _text(nvml.nvmlSystemGetNVMLVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }
    return gpus, judge_driver(gpus, driver_gpus(root), versions)


def judge_driver(gpus: int, known: int, versions: dict[str, str]) -> Finding:
    """Judge the number of GPUs that NVML has against the number that the kernel driver took over."""
    evidence = f"driver {versions['driver']}, CUDA {versions['cuda']}, {gpus} GPU{'s'[: gpus != 1]}"
    data: dict[str, Any] = {**versions, "gpus": gpus}
    value = versions["driver"]
    if gpus < known:
        evidence += f", though the kernel driver has {known}: {known - gpus} did not start"
        data["cause"] = "gpu_fell_off_bus"
        cure = "reboot the node; leave it out, and hand the GPU in for replacement, if it stays away"
        return found("driver", "", Status.FAILED, value=value, evidence=evidence, cure=cure, data=data)
    status = Status.OK if gpus else Status.UNAVAILABLE
    return found("driver", "", status, value=value, evidence=evidence, data=data)


def judge_choice(described: Finding, gpus: int, mine: Choice, env: Mapping[str, str]) -> Finding:
    """Return what is said of the driver, with the GPUs that are the job's where those are not all."""
    if len(mine.indices) == gpus and not mine.missing and mine.sure:
        return described
    seen = ", ".join(map(str, mine.indices)) or "none"
    evidence = f"{described.evidence}; the job's: {seen}"
    complete = mine.sure and not mine.missing and not any(entry.isdecimal() for entry in entries(env) or ())
    # Those that did not start are others' where each of the job's is named by itself, and is there.
    known = attrs.evolve(described, evidence=evidence, must=described.must and not complete)
    if described.status is Status.FAILED or (mine.sure and not mine.missing):
        return known
    cure = f"correct {VISIBLE}"
    if mine.missing:
        evidence += f"; {VISIBLE} names {mine.missing}, which is not here: CUDA ignores it and all after it"
    else:
        evidence += f" at most: which they are by {VISIBLE} only CUDA can tell, as they are of several models"
        cure = f"set {ORDER}=PCI_BUS_ID, or name them by UUID (`nvidia-smi -L`)"
    return attrs.evolve(known, status=Status.DEGRADED, evidence=evidence, cure=cure)


def pci_gpus(root: str) -> list[str]:
    """Return the addresses of the NVIDIA GPUs on the PCI bus."""
    gpus = []
    for device in sorted(Path(root, "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            gpus.append(device.name)
    return gpus


def driver_gpus(root: str) -> int:
    """Return how many GPUs the kernel driver lists; 0 where it does not tell. A container sees only its own."""
    try:
        return len(os.listdir(Path(root, "proc/driver/nvidia/gpus")))
    except OSError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
