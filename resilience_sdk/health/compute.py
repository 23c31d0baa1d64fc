"""The compute check of one device: a product whose checksum is known, in each type, and how fast it went.

All elements are 1 or -1, by a hash of their place. An element of the product of two such matrices of even size is an
even number; below 512 even bfloat16 holds it exactly, whatever the order of the additions. So one checksum is right for
all types, kernels and devices. The checksum weighs each element by its row and column, so that errors do not cancel.

Runs in a process of its own for each device; the only probe that imports torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import COMPUTE, Context

# Of the product, by size; computed with Python's integers (a test does it again for the small one).
CHECKSUMS = {256: 8_238_132, 1024: -39_161_546, 4096: -1_443_610_538}
_ROWS, _COLUMNS = 97, 89  # weights go from 1 to these, and begin again
_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MASK = 0xFFFFFFFF


def matrix(torch: Any, size: int, salt: int, device: str) -> Any:
    """Return one of the two matrices as int64, computed where it will be used; the salt tells them apart."""
    places = torch.arange(size, dtype=torch.int64, device=device)
    mixed = (places[:, None] * _MIX[0] + places[None, :] * _MIX[1] + salt * _MIX[2]) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * _MIX[1]) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * _MIX[2]) & _MASK
    return 1 - 2 * ((mixed >> 16) & 1)


def checksum(torch: Any, product: Any) -> int:
    """Return the weighted sum of a product's elements; exact, because it stays far below 2^53."""
    rows, columns = (torch.arange(size, dtype=torch.float64, device=product.device) for size in product.shape)
    weighed = (rows % _ROWS + 1) @ product.to(torch.float64)
    return int((weighed * (columns % _COLUMNS + 1)).sum().item())


CPU = "cpu"
SIZES = {"cpu": 1024, "cuda": 4096}
TYPES = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}
SLOW_SHARE = 0.9  # of the median of the node's other devices: throttled or worn ones stay below, sound ones within 3 %
_WARM_UP, _TIMED_S, _MAX_TIMED = 2, 0.3, 200


def probe(context: Context) -> Iterator[Finding]:
    """Yield what `context.only` computes (`cpu`, `cuda:0`), and how fast."""
    device = context.only
    try:
        import torch
    except ImportError as error:
        yield COMPUTE.found("compute", Status.UNAVAILABLE, f"torch: {error}", subject=device)
        return
    if device != CPU and not built_for_gpus(torch):
        if device != "cuda:0":
            evidence = "torch is built for the processor alone"
            yield COMPUTE.found("compute", Status.UNAVAILABLE, evidence, subject=device)
            return
        device = CPU
    yield from check(torch, device)


def built_for_gpus(torch: Any) -> bool:
    """Tell whether this torch can use a GPU, whatever the machine has. Asks no driver."""
    return bool(torch.version.cuda or torch.version.hip)


def check(torch: Any, device: str) -> Iterator[Finding]:
    """Yield one finding for the results of a device, and one for its speed."""
    kind = device.partition(":")[0]
    size = SIZES[kind]
    speeds: dict[str, float] = {}
    wrong: list[str] = []
    try:
        first, second = (matrix(torch, size, salt, device) for salt in (1, 2))
        for name in TYPES[kind]:
            left, right = (part.to(getattr(torch, name)) for part in (first, second))
            found = checksum(torch, left @ right)
            if found != CHECKSUMS[size]:
                wrong.append(f"in {name} {found} instead of {CHECKSUMS[size]}")
            speeds[name] = 2.0 * size**3 / _seconds(torch, kind, partial(torch.matmul, left, right))
    # Among them torch's OutOfMemoryError; a torch that was built for no GPU asserts.
    except (RuntimeError, AssertionError) as error:
        evidence = f"cannot compute: {' '.join(str(error).split())[:300]}"
        cure = "end what else uses it (`nvidia-smi`); if nothing does, leave this node out and see `dmesg -T`"
        yield COMPUTE.found("compute", Status.FAILED, evidence, subject=device, cure=cure)
        return
    status, evidence = Status.OK, f"right in {', '.join(TYPES[kind])} at {size} x {size}"
    if wrong:
        status, evidence = Status.FAILED, f"a product of known checksum came out wrong: {'; '.join(wrong)}"
    yield COMPUTE.found("compute", status, evidence, len(wrong), subject=device)
    evidence = ", ".join(f"{name} {speed / 1e9:.0f} GFLOP/s" for name, speed in speeds.items())
    slowest = round(min(speeds.values()) / 1e9, 1)
    yield COMPUTE.found("compute_speed", Status.OK, evidence, slowest, subject=device, data={"flops": speeds})


def slow_devices(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with those of devices degraded that are slower than their neighbours in any type. Pure."""
    speeds = {finding.subject: flops for finding in findings if (flops := _flops(finding))}
    return [_compared(finding, speeds) if _flops(finding) else finding for finding in findings]


def _flops(finding: Finding) -> dict[str, float]:
    """Return the speeds of a finding by type; none of one that has none, or that a stranger's report made up."""
    flops = finding.data.get("flops")
    if (finding.probe, finding.check) != (COMPUTE.name, "compute_speed") or not isinstance(flops, dict):
        return {}
    return {name: speed for name, speed in flops.items() if isinstance(speed, (int, float))}


def _compared(finding: Finding, speeds: dict[str, dict[str, float]]) -> Finding:
    others = [flops for subject, flops in speeds.items() if subject != finding.subject]
    for name, speed in speeds[finding.subject].items():
        alike = [flops[name] for flops in others if name in flops]
        # Of two neighbours the slower one, so that a lucky one makes nobody slow.
        if alike and speed < SLOW_SHARE * (usual := statistics.median_low(alike)):
            return COMPUTE.found(
                "compute_speed",
                Status.DEGRADED,
                f"{name} at {speed / 1e9:.0f} GFLOP/s, its neighbours at {usual / 1e9:.0f}",
                round(speed / 1e9, 1),
                subject=finding.subject,
                data=finding.data,
                limit=round(SLOW_SHARE * usual / 1e9, 1),
            )
    return finding


def _seconds(torch: Any, kind: str, multiply: Callable[[], Any]) -> float:
    """Return the median duration of one product."""
    took: list[float] = []
    while len(took) < _WARM_UP + _MAX_TIMED and sum(took[_WARM_UP:]) < _TIMED_S:
        began = time.perf_counter()
        multiply()
        if kind == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median_high(took[_WARM_UP:])
