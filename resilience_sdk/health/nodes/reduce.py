"""One node's part in one trial of a pair: a process for each device, which computes, and reduces with the partner's.

The processes are forked from one that has torch loaded and nothing else: a round then costs no import, and a driver or
a collective that hangs costs a process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs

from resilience_sdk.health.compute import pattern
from resilience_sdk.health.compute.probe import CPU
from resilience_sdk.health.host.processors import processor_model
from resilience_sdk.health.nodes.verdict import Report

LIMIT_S = {"gloo": 12.0, "nccl": 60.0}  # to connect and to reduce; NCCL starts slowly
MARGIN_S = 5.0  # for what comes before that
_COMPUTE_S = 0.5
_SIZE = {"gloo": 1024, "nccl": 4096}  # of the matrices
_FLOATS = {"gloo": 1 << 20, "nccl": 1 << 26}
_TIMES = 8
_LONGEST_WHY = 300
_COLLECT_S, _COLLECT_TIMES = 0.005, 200


@attrs.frozen
class Part:
    """What a node is to do in a trial. `port`, `prefix`: the store in which the two meet, and where in it.

    `devices` are those of this node, `offset` is the first of its ranks, `world` the ranks of both nodes.
    """

    host: str
    port: int
    prefix: str
    backend: str
    devices: Sequence[str]
    offset: int
    world: int


def part_of(node: int, pair: tuple[int, int], reports: Mapping[int, Report], host: str, port: int, prefix: str) -> Part:
    """Return what a node has to do in the trial of a pair."""
    backend = _backend(pair, reports)
    devices = {each: reports[each].devices if backend == "nccl" else (CPU,) for each in pair}
    return Part(
        host=host,
        port=port,
        prefix=prefix,
        backend=backend,
        devices=devices[node],
        offset=0 if node == pair[0] else len(devices[pair[0]]),
        world=sum(map(len, devices.values())),
    )


def limit_of(pair: tuple[int, int], reports: Mapping[int, Report]) -> float:
    """Return for how many seconds the trial of a pair may be waited for."""
    return LIMIT_S[_backend(pair, reports)] + 2 * MARGIN_S


def _backend(pair: tuple[int, int], reports: Mapping[int, Report]) -> str:
    """Return nccl where both nodes have GPUs only."""
    devices = [device for node in pair for device in reports[node].devices]
    return "nccl" if devices and CPU not in devices else "gloo"


def take_part(part: Part, perform: Callable[[Part, int], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return `{seconds, why, rate, model, backend}`, of the slowest device.

    `seconds` are those of one reduction, None where none came about; `rate` is in products per second, `model` what
    the device is. Returns within the backend's limit and a margin. `perform` is what the process of a device does
    (`_perform`).
    """
    ends = time.monotonic() + LIMIT_S[part.backend] + MARGIN_S
    children = [_fork(part, number, perform or _perform) for number in range(len(part.devices))]
    texts = [_line(pipe, ends) for _, pipe in children]
    codes = _end([pid for pid, _ in children])
    answers = [_answer(text, code) for text, code in zip(texts, codes, strict=True)]
    whys = [str(answer["why"]) for answer in answers if answer["why"]]
    seconds = [answer["seconds"] for answer in answers]
    rates = [answer["rate"] for answer in answers]
    slowest = answers[rates.index(min(rates))] if None not in rates else answers[0]
    return {
        "seconds": None if whys or None in seconds else max(seconds),
        "why": "; ".join(dict.fromkeys(whys)),
        "rate": None if None in rates else min(rates),
        "model": slowest["model"],
        "backend": part.backend,
    }


def _fork(part: Part, number: int, perform: Callable[[Part, int], dict[str, Any]]) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S[part.backend] + 2 * MARGIN_S)  # should our parent be killed
        os.write(write, json.dumps(perform(part, number)).encode() + b"\n")
    finally:
        os._exit(0)  # no destructor: that of a process group may wait for a partner that is gone


def _line(pipe: int, ends: float) -> bytes:
    """Return what the process of a device wrote until `ends` (monotonic); something else may hold its pipe open."""
    text = b""
    while not text.endswith(b"\n") and select.select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]:
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        text += piece
    os.close(pipe)
    return text


def _answer(text: bytes, code: int | None) -> dict[str, Any]:
    """Return what the process of a device told, or how it ended; `code` is None where it could not be killed."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(text))
    killed = code in (None, 0, -signal.SIGKILL)
    died = "did not answer in time" if killed else f"died by signal {-(code or 0)}"
    return {"seconds": None, "why": f"its process {died}", "rate": None, "model": ""}


def _end(pids: Sequence[int]) -> list[int | None]:
    """Kill processes and return their exit codes, None for each that is stuck in the kernel; that is left alone.

    All together, so that several that are stuck take no longer than one: the partner waits for this node's answer.
    """
    codes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(_COLLECT_TIMES):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        if len(codes) == len(pids):
            break
        time.sleep(_COLLECT_S)
    return [codes.get(pid) for pid in pids]


def _perform(part: Part, number: int) -> dict[str, Any]:
    """Compute and reduce on one device; runs in a process of its own."""
    result: dict[str, Any] = {"seconds": None, "why": "", "rate": None, "model": ""}
    device = part.devices[number]
    try:
        import torch

        torch.set_num_threads(1)  # each node alike, and none held up by what else its neighbours run
        if device != CPU:
            torch.cuda.set_device(device)
        result["model"] = processor_model() if device == CPU else torch.cuda.get_device_name(device)
        result["rate"] = round(_rate(torch, part.backend, device), 3)
        result["seconds"] = round(_reduce(torch, part, number, device), 6)
    except Exception as error:  # noqa: BLE001 - whatever it is, this is how the trial went
        result["why"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_WHY]
    return result


def _rate(torch: Any, backend: str, device: str) -> float:
    """Return how many products of two matrices the device computes per second; raises ValueError for a wrong one."""
    size = _SIZE[backend]
    kind = torch.float32 if device == CPU else torch.bfloat16
    left, right = (pattern.matrix(torch, size, salt, device).to(kind) for salt in (1, 2))
    found = pattern.checksum(torch, left @ right)
    if found != pattern.CHECKSUMS[size]:
        raise ValueError(f"{device}: a product of known checksum {pattern.CHECKSUMS[size]} came out as {found}")
    began, times = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < _COMPUTE_S or not times:
        torch.matmul(left, right)
        if device != CPU:
            torch.cuda.synchronize()
        times += 1
    return times / took


def _reduce(torch: Any, part: Part, number: int, device: str) -> float:
    """Return how many seconds a reduction over the devices of both nodes takes at best; raises what torch raises."""
    from torch import distributed

    limit = timedelta(seconds=LIMIT_S[part.backend])
    server = distributed.TCPStore(part.host, part.port, is_master=False, wait_for_workers=False, timeout=limit)
    store = distributed.PrefixStore(part.prefix, server)
    rank = part.offset + number
    distributed.init_process_group(part.backend, store=store, rank=rank, world_size=part.world, timeout=limit)
    values = torch.empty(_FLOATS[part.backend], device=device)

    def reduce() -> float:
        values.fill_(rank + 1.0)
        began = time.perf_counter()
        distributed.all_reduce(values)
        if device != CPU:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    reduce()  # connections are made by the first
    took = min(reduce() for _ in range(_TIMES))  # a slow link is slow each time, a busy processor is not
    expected = part.world * (part.world + 1) / 2
    if not bool((values == expected).all()):
        raise ValueError(f"{device}: the sum of a reduction is wrong ({values.min().item()} instead of {expected})")
    distributed.barrier()  # nobody leaves while the other one still reads
    return took
