"""The compute check of one device: a product whose checksum is known, in each type, and how fast it went.

Runs in a process of its own for each device; the only probe that imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from resilience_sdk.health.compute import pattern
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import low
from resilience_sdk.health.probes import Context

PROBE = "compute"
CPU = "cpu"
_CUDA = "cuda"
_FOR_CPU = "torch is built for the processor alone"
SIZES = {"cpu": 1024, "cuda": 4096}
TYPES = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}
SLOW_SHARE = 0.9  # of the median of the node's other devices: throttled or worn ones stay below, sound ones within 3 %
_WARM_UP, _TIMED_S, _MOST_TIMED = 2, 0.3, 200
_WRONG_CURE = (
    "leave this node out, it computes wrongly without a word: `dcgmi diag -r 3` (a processor: `stress-ng --verify`), "
    "then replace the device"
)


def probe(context: Context) -> Iterator[Finding]:
    """Yield what `context.only` computes (`cpu`, `cuda:0`), and how fast."""
    try:
        import torch
    except ImportError as error:
        yield Finding(
            probe=PROBE, check="compute", subject=context.only, status=Status.UNAVAILABLE, evidence=f"torch: {error}"
        )
        return
    device, first = context.only, f"{_CUDA}:0"
    if device.startswith(_CUDA) and not built_for_gpus(torch):
        if device != first:
            yield Finding(probe=PROBE, check="compute", subject=device, status=Status.UNAVAILABLE, evidence=_FOR_CPU)
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
        first, second = (pattern.matrix(torch, size, salt, device) for salt in (1, 2))
        for name in TYPES[kind]:
            left, right = (part.to(getattr(torch, name)) for part in (first, second))
            found = pattern.checksum(torch, left @ right)
            if found != pattern.CHECKSUMS[size]:
                wrong.append(f"in {name} {found} instead of {pattern.CHECKSUMS[size]}")
            speeds[name] = 2.0 * size**3 / _seconds(torch, kind, partial(torch.matmul, left, right))
    # Among them torch's OutOfMemoryError; a torch that was built for no GPU asserts.
    except (RuntimeError, AssertionError) as error:
        yield Finding(
            probe=PROBE,
            check="compute",
            subject=device,
            status=Status.FAILED,
            evidence=f"cannot compute: {' '.join(str(error).split())[:300]}",
            cure="end what else uses it (`nvidia-smi`); if nothing does, leave this node out and see `dmesg -T`",
            must=True,
        )
        return
    yield Finding(
        probe=PROBE,
        check="compute",
        subject=device,
        status=Status.FAILED if wrong else Status.OK,
        value=len(wrong),
        unit="wrong products",
        threshold=0,
        evidence=f"a product of known checksum came out wrong: {'; '.join(wrong)}"
        if wrong
        else f"right in {', '.join(TYPES[kind])} at {size} x {size}",
        cure=_WRONG_CURE if wrong else "",
        must=True,
    )
    yield Finding(
        probe=PROBE,
        check="compute_speed",
        subject=device,
        status=Status.OK,
        value=round(min(speeds.values()) / 1e9, 1),
        unit="GFLOP/s",
        evidence=", ".join(f"{name} {speed / 1e9:.0f} GFLOP/s" for name, speed in speeds.items()),
        data={"flops": speeds},
    )


def slow_devices(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with those of devices degraded that are slower than their neighbours in any type. Pure."""
    speeds = {f.subject: flops for f in findings if f.probe == PROBE and (flops := _flops(f))}
    return [_judged(finding, speeds) if _flops(finding) else finding for finding in findings]


def _flops(finding: Finding) -> dict[str, float]:
    """Return the speeds of a finding by type; none of one that has none, or that a stranger's report made up."""
    flops = finding.data.get("flops") if finding.check == "compute_speed" else None
    if not isinstance(flops, dict):
        return {}
    return {name: speed for name, speed in flops.items() if isinstance(speed, (int, float))}


def _judged(finding: Finding, speeds: dict[str, dict[str, float]]) -> Finding:
    others = [flops for subject, flops in speeds.items() if subject != finding.subject]
    for name, speed in speeds[finding.subject].items():
        usual = _median([flops[name] for flops in others if name in flops])
        if usual is None:
            continue
        status = low(speed, degraded=SLOW_SHARE * usual)
        if status is not Status.OK:
            return attrs.evolve(
                finding,
                status=status,
                value=round(speed / 1e9, 1),
                threshold=round(SLOW_SHARE * usual / 1e9, 1),
                evidence=f"{name} at {speed / 1e9:.0f} GFLOP/s, its neighbours at {usual / 1e9:.0f}",
                cure="see what slows it (`nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE`), or leave this node out",
            )
    return finding


def _median(values: Sequence[float]) -> float | None:
    """Return the lower median: of two neighbours the slower one, so that a lucky one makes nobody slow."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _seconds(torch: Any, kind: str, multiply: Callable[[], Any]) -> float:
    """Return the median duration of one product."""

    def timed() -> float:
        began = time.perf_counter()
        multiply()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(_WARM_UP):
        timed()
    took: list[float] = []
    while len(took) < _MOST_TIMED and sum(took) < _TIMED_S:
        took.append(timed())
    return sorted(took)[len(took) // 2]
