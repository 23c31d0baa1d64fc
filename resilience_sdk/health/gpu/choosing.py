"""Asking NVML for the GPUs of a job, each in a thread of its own: one that does not answer hides no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu import visible
from resilience_sdk.health.gpu.visible import Choice, Gpu


def choice(nvml: Any, gpus: int, env: Mapping[str, str], limit_s: float) -> Choice:
    """Return which of NVML's GPUs are the job's; waits that long for those that are slow to tell who they are."""
    named = visible.entries(env)
    if named is None:
        return Choice(tuple(range(gpus)))
    told: dict[int, Gpu] = {}
    parents: dict[str, str] = {}
    asks = [partial(_ask_gpu, nvml, index, told) for index in range(gpus)]
    asks += [partial(_ask_parent, nvml, entry, parents) for entry in named if entry.startswith("MIG-")]
    threads = [threading.Thread(target=ask, name="resilience-gpu", daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    known = dict(told)
    return visible.choose(env, [known.get(index, Gpu(index)) for index in range(gpus)], dict(parents))


def mig_handle(nvml: Any, device: Any, name: str) -> tuple[bool, Any]:
    """Return whether a GPU is divided, and the handle of the instance of that name where it can be had."""
    mode = codes.answer(nvml.nvmlDeviceGetMigMode, device)
    if not mode or not mode[0]:
        return False, None
    return True, codes.answer(nvml.nvmlDeviceGetHandleByUUID, name.encode()) if name else None


def _ask_gpu(nvml: Any, index: int, told: dict[int, Gpu]) -> None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        told[index] = Gpu(index, _text(uuid), _text(name))
    except Exception as error:  # noqa: BLE001 - what ails it its own checks tell
        if codes.code_of(error) == codes.NO_PERMISSION:
            told[index] = Gpu(index, denied=True)


def _ask_parent(nvml: Any, entry: str, parents: dict[str, str]) -> None:
    if uuid := visible.old_mig_parent(entry):
        parents[entry] = uuid
        return
    try:
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(entry.encode()))
        parents[entry] = _text(nvml.nvmlDeviceGetUUID(parent))
    except Exception:  # noqa: BLE001, S110 - then it names nothing here
        pass


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
