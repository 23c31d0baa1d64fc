"""Which of a node's GPUs are the job's: `CUDA_VISIBLE_DEVICES` read as CUDA reads it, against the GPUs of NVML. Pure.

CUDA numbers the GPUs that this process may open: by their place on the bus, as NVML does, or the fastest first, which
is the same where all are of one model. It reads entries until the first that names nothing, and takes none at all
where one is named twice. An entry may be the beginning of a UUID, or name an instance of a GPU that is divided (MIG).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_BY_PLACE = "PCI_BUS_ID"
_MIG, _OLD_MIG = "MIG-", "MIG-GPU-"


@attrs.frozen
class Gpu:
    """One GPU of NVML. `uuid` and `name` are empty where it does not tell; `denied`: this process may not open it."""

    index: int
    uuid: str = ""
    name: str = ""
    denied: bool = False


@attrs.frozen
class Choice:
    """The GPUs of a job, by NVML's numbers.

    `migs`: by GPU, the name of the instance that is the job's. `missing`: the first entry that names nothing.
    `sure`: these are the job's; False where only CUDA could tell, so that all that may be are among them.
    """

    indices: tuple[int, ...]
    migs: Mapping[int, str] = attrs.field(factory=dict)
    missing: str = ""
    sure: bool = True


def entries(env: Mapping[str, str]) -> list[str] | None:
    """Return what is named in `CUDA_VISIBLE_DEVICES` as far as CUDA reads it; None where it is not set."""
    value = env.get(VISIBLE)
    if value is None:
        return None
    named: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", _MIG))):
            break
        named.append(entry)
    return named if len(set(named)) == len(named) else []


def cuda_devices(env: Mapping[str, str], present: int) -> int:
    """Return how many devices a process of the job has, where `present` GPUs are there."""
    named = entries(env)
    if named is None:
        return present
    if any(entry.startswith(_MIG) for entry in named):
        return min(1, present)  # CUDA gives a process one instance
    past = next((place for place, entry in enumerate(named) if entry.isdecimal() and int(entry) >= present), len(named))
    return min(past, present)


def choose(env: Mapping[str, str], gpus: Sequence[Gpu], parents: Mapping[str, str]) -> Choice:
    """Return which of a node's GPUs are the job's; `parents` has the GPU's UUID for each instance that is named."""
    mine = [gpu for gpu in gpus if not gpu.denied]
    named = entries(env)
    if named is None:
        return Choice(tuple(gpu.index for gpu in mine))
    chosen: dict[int, None] = {}
    migs: dict[int, str] = {}
    missing = ""
    for entry in named:
        gpu = mine[int(entry)] if entry.isdecimal() and int(entry) < len(mine) else None
        if not entry.isdecimal():
            uuid = parents.get(entry, "") if entry.startswith(_MIG) else entry
            found = [gpu for gpu in mine if uuid and gpu.uuid.startswith(uuid)]
            gpu = found[0] if len(found) == 1 else None
        if gpu is None:
            missing = entry
            break
        chosen[gpu.index] = None
        if entry.startswith(_MIG):
            migs.setdefault(gpu.index, entry)
    if missing:  # it may be one that does not even tell its name
        chosen |= dict.fromkeys(gpu.index for gpu in mine if not gpu.uuid)
    models = {gpu.name for gpu in mine if gpu.name}
    by_number = any(entry.isdecimal() for entry in named)
    if by_number and len(models) > 1 and env.get(ORDER) != _BY_PLACE and len(chosen) < len(mine):
        return Choice(tuple(gpu.index for gpu in mine), migs, missing, sure=False)
    return Choice(tuple(sorted(chosen)), migs, missing)


def old_mig_parent(entry: str) -> str:
    """Return the UUID of the GPU in the older name of an instance, `MIG-GPU-<uuid>/<instance>/<instance>`, else ''."""
    return entry.removeprefix(_MIG).partition("/")[0] if entry.startswith(_OLD_MIG) else ""
