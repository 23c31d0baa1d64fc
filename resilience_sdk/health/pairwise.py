"""Pairwise trials of the nodes of a job, before its first attempt: one node's part, in a process of its own.

Each node tells what it has seen, one concludes, and what stands first in the store counts.

Rounds follow one another by *words*, each made by `compare_set`: the plan of a round with all trials before it, and at
last the verdict. The first node makes them, so that a thousand nodes do not read a thousand reports each; where it
does not, whoever has waited long enough does, and only one of them succeeds. Every wait has an end.

The meeting as a whole ends by one more such key: with the last word's verdict, or because a node had to give up. What
stands there first holds for all, also for a node that knew better, or whose process was gone by then (its launcher
asks that key): if one started its ranks and another did not, the job would wait for itself.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.json_records import from_values, to_values
from resilience_sdk.health import compute
from resilience_sdk.health.checkup import compute_probes, read_task, tell
from resilience_sdk.health.compute import CPU
from resilience_sdk.health.host import processor_model
from resilience_sdk.health.pairwise_verdict import (
    MAX_ROUNDS,
    NodeReport,
    Pair,
    Trial,
    from_reports,
    from_trials,
    next_pairs,
    together,
)

MAX_S = 600  # of the whole process
REPORT_S = 60.0  # for the slowest node to load torch and to tell what it has
_STORE_S = 30.0  # for one request
_TAKE_OVER_S = 10.0  # beyond what the first node may take
_LET_READ_S = 5.0
_LAST_READ_S = 0.1
_POLL_S, _MAX_POLL_S = 0.02, 0.25


def main() -> int:
    """Take part, and tell how the meeting ended, the same for each node; raises what makes that impossible.

    The task is a JSON object: `host`, `port`, `prefix` (the store of the rendezvous, and a place in it that belongs to
    this meeting), `end` (the key of its end), `node`, `names`, `spare`, `holds_store`, `findings` (of this node's own
    preflight), `refusal` (see `pairwise_verdict.Refusal`) and `answer`, a file descriptor. Whatever else is written
    here is for people, and goes to standard error.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MAX_S)
    task = read_task()
    environ.environment().setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a trial that fails is told by us
    import torch
    from torch import distributed

    has_gpus = compute.built_for_gpus(torch)
    devices = [probe.only for probe in compute_probes(environ.environment())] if has_gpus else [CPU]
    limit = timedelta(seconds=_STORE_S)
    store = distributed.TCPStore(task["host"], task["port"], is_master=False, wait_for_workers=False, timeout=limit)
    conference = Conference(
        store=distributed.PrefixStore(task["prefix"], store),
        node=task["node"],
        names=task["names"],
        report={**{name: task[name] for name in ("findings", "refusal", "holds_store")}, "devices": devices},
        spare=task["spare"],
        trials=Trials(task["node"], task["host"], task["port"], task["prefix"]),
        end=task["end"],
    )
    try:
        end = conference.hold()
    except Exception as error:  # noqa: BLE001 - whatever it was, all must come to the same end
        end = conference.give_up(f"{type(error).__name__}: {' '.join(str(error).split())}")
    tell(task, end)
    os._exit(0)  # torch takes its time to end, and a store that is gone may hold it up


class OverError(Exception):
    """The meeting has ended meanwhile."""


@attrs.frozen
class Word:
    """What all go on from: who has reported, who takes part, who does not answer any more, what was tried so far, and
    the next pairs with the seconds that they may take; or the verdict, which is the last word.
    """

    reported: tuple[int, ...]
    nodes: tuple[int, ...]
    silent: tuple[int, ...] = ()
    trials: tuple[Trial, ...] = ()
    pairs: tuple[Pair, ...] = ()
    limit_s: float = 0.0
    verdict: Mapping[str, Any] | None = None

    @property
    def listening(self) -> tuple[int, ...]:
        """Who still follows, those that are left out for what they reported among them."""
        return tuple(node for node in self.reported if node not in self.silent)


@attrs.define(kw_only=True)
class Conference:
    """One node's part in it. Raises what the store raises."""

    store: Any
    node: int
    names: Sequence[str]
    report: Mapping[str, Any]
    """The values of a `NodeReport`."""
    spare: int
    """Without how many nodes the job can do."""
    trials: Trials
    end: str = "end"
    """The key of the meeting's end."""
    report_s: float = REPORT_S
    round_s: float | None = None
    """How long a round may take, else as long as its trials."""

    def hold(self) -> dict[str, Any]:
        """Return how the meeting ended, as JSON values: its `verdict`, or why it is `broken`, so that nothing follows.

        The verdict is that of `NodesVerdict.to_json` with `holds_store`, the nodes that hold the rendezvous's store.
        """
        try:
            word = self._confer()
        except OverError:
            end = json.loads(self.store.get(self.end))
        else:
            end = self._first(self.end, {"verdict": word.verdict, "listening": word.listening})
        if "broken" not in end:
            self._let_read(end["listening"])
        return dict(end)

    def give_up(self, why: str) -> dict[str, Any]:
        """End the meeting, as this node's part failed for a mistake of ours; return how it ended, as `hold` does."""
        return self._first(self.end, {"broken": f"{self.names[self.node]}: {why}"})

    def _first(self, key: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """Say this there, and return what was said there first."""
        return dict(json.loads(self.store.compare_set(key, "", json.dumps(said))))

    def _confer(self) -> Word:
        """Return the last word.

        Raises:
            OverError: The meeting has ended before.
        """
        self._tell("report", self.report)
        word = self._agree(0, 0, self._open, self.report_s)
        for number in range(2 * MAX_ROUNDS):
            if word.verdict is not None:
                break
            for pair in word.pairs:
                if self.node in pair:
                    self._tell(f"trial/{number}", self.trials.take_part(number, pair, self._reports(pair)))
            word = self._agree(number + 1, min(word.listening), partial(self._go_on, word, number), word.limit_s)
        return word

    def _agree(self, number: int, first: int, conclude: Callable[[float], Word], limit_s: float) -> Word:
        """Return the word of that number; make it where it is this node's turn, or nobody else does."""
        key = f"word/{number}"
        is_turn = self.node == first
        if not is_turn and self._wait([key], limit_s + _TAKE_OVER_S):
            return from_values(Word, json.loads(self.store.get(key)))
        return from_values(Word, self._first(key, to_values(conclude(limit_s if is_turn else 0.0))))

    def _open(self, limit_s: float) -> Word:
        """Return the first word: the verdict where the reports are enough for one, else the first pairs."""
        reported = tuple(self._gather("report", range(len(self.names)), limit_s))
        verdict = from_reports(self.names, self._reports(reported))
        nodes = tuple(node for node in reported if node not in verdict.leave_out)
        over = bool(verdict.stop) or len(verdict.leave_out) > self.spare
        return self._concluded(Word(reported, nodes, pairs=() if over else next_pairs(nodes, ())))

    def _go_on(self, word: Word, number: int, limit_s: float) -> Word:
        """Return the word after a round: the next pairs, or the verdict."""
        asked = [node for pair in word.pairs for node in pair]
        told = self._gather(f"trial/{number}", asked, limit_s)
        lost = tuple(node for node in asked if node not in told)
        nodes = tuple(node for node in word.nodes if node not in lost)
        held = tuple(trial_of(number, pair, told) for pair in word.pairs if not set(pair) & set(lost))
        trials = (*word.trials, *held)
        return self._concluded(Word(word.reported, nodes, (*word.silent, *lost), trials, next_pairs(nodes, trials)))

    def _concluded(self, word: Word) -> Word:
        """Return a word with the limit of its pairs, or with the verdict where there are none."""
        reports = self._reports(word.reported)
        if word.pairs:
            limits = [LIMIT_S[_backend(pair, reports)] + 2 * MARGIN_S for pair in word.pairs]
            return attrs.evolve(word, limit_s=self.round_s or max(limits))
        before = from_reports(self.names, reports)
        after = from_trials(self.names, word.nodes, word.silent, word.trials)
        held = [node for node, report in reports.items() if report.holds_store]
        return attrs.evolve(word, verdict={**together(before, after).to_json(), "holds_store": held})

    def _tell(self, what: str, data: Mapping[str, Any]) -> None:
        self.store.set(f"{what}/{self.node}", json.dumps(data))

    def _gather(self, what: str, nodes: Iterable[int], limit_s: float = 0.0) -> dict[int, Any]:
        """Return what these nodes tell, by node; those that do not tell it in time are missing."""
        keys = {node: f"{what}/{node}" for node in nodes}
        if not self._wait(list(keys.values()), limit_s):
            keys = {node: key for node, key in keys.items() if self.store.check([key])}
        values = self.store.multi_get(list(keys.values())) if keys else []
        return {node: json.loads(value) for node, value in zip(keys, values, strict=True)}

    def _reports(self, nodes: Iterable[int]) -> dict[int, NodeReport]:
        return {node: from_values(NodeReport, data) for node, data in self._gather("report", nodes).items()}

    def _wait(self, keys: list[str], limit_s: float) -> bool:
        """Wait until all keys exist, and tell whether they do. Asks, as a `wait` of torch's could not be given up.

        Raises:
            OverError: The meeting has ended.
        """
        ends, pause_s = time.monotonic() + limit_s, _POLL_S
        while not self.store.check(keys):
            if self.store.check([self.end]):
                raise OverError
            if time.monotonic() > ends:
                return False
            time.sleep(pause_s)
            pause_s = min(_MAX_POLL_S, 1.5 * pause_s)
        return True

    def _let_read(self, listening: Iterable[int]) -> None:
        """Wait a moment until all others have read the end: the store may go with one of the launchers."""
        with contextlib.suppress(Exception):  # it has gone: what was read holds
            self._tell("read", {})
            ends = time.monotonic() + _LET_READ_S
            while not self.store.check([f"read/{node}" for node in listening]) and time.monotonic() < ends:
                time.sleep(_POLL_S)
            time.sleep(_LAST_READ_S)  # nobody knows who has the store: the others read this last key, too


def trial_of(number: int, pair: Pair, told: Mapping[int, Mapping[str, Any]]) -> Trial:
    """Return what came of a pair from what its two nodes tell. Pure."""
    seconds = [told[node]["seconds"] for node in pair]
    return Trial(
        round=number,
        pair=pair,
        seconds=None if None in seconds else max(seconds),
        why="; ".join(dict.fromkeys(told[node]["why"] for node in pair if told[node]["why"])),
        rates={node: told[node]["rate"] for node in pair if told[node]["rate"] is not None},
        models={node: told[node]["model"] for node in pair},
        backend=told[pair[0]]["backend"],
    )


LIMIT_S = {"gloo": 12.0, "nccl": 60.0}  # to connect and to reduce; NCCL starts slowly
MARGIN_S = 5.0  # for what comes before that
_COMPUTE_S = 0.5
_SIZE = {"gloo": 1024, "nccl": 4096}  # of the matrices
_FLOATS = {"gloo": 1 << 20, "nccl": 1 << 26}
_TIMES = 8
_MAX_WHY = 300
_COLLECT_S = 1.0
_FORK = multiprocessing.get_context("fork")


def _backend(pair: Pair, reports: Mapping[int, NodeReport]) -> str:
    """Return nccl where both nodes have GPUs only."""
    devices = [device for node in pair for device in reports[node].devices]
    return "nccl" if devices and CPU not in devices else "gloo"


@attrs.frozen
class TrialPart:
    """What a node is to do in a trial. `host`, `port`, `prefix`: the store in which the two meet, and where in it.

    `devices` are those of this node, `offset` is the first of its ranks, `world` the ranks of both nodes.
    """

    host: str
    port: int
    prefix: str
    backend: str
    devices: Sequence[str]
    offset: int
    world: int


@attrs.frozen
class Trials:
    """This node's parts in trials of pairs, and the store in which pairs meet."""

    node: int
    host: str
    port: int
    prefix: str

    def take_part(self, number: int, pair: Pair, reports: Mapping[int, NodeReport]) -> dict[str, Any]:
        """Return what came of the trial of a pair in that round (see `hold_trial`)."""
        return hold_trial(self.part_of(number, pair, reports))

    def part_of(self, number: int, pair: Pair, reports: Mapping[int, NodeReport]) -> TrialPart:
        """Return what this node has to do in it."""
        backend = _backend(pair, reports)
        devices = {each: reports[each].devices if backend == "nccl" else (CPU,) for each in pair}
        offset, world = 0 if self.node == pair[0] else len(devices[pair[0]]), sum(map(len, devices.values()))
        prefix = f"{self.prefix}/group/{number}/{pair[0]}"
        return TrialPart(self.host, self.port, prefix, backend, devices[self.node], offset, world)


_FAILED: Mapping[str, Any] = {"seconds": None, "why": "", "rate": None, "model": ""}


def hold_trial(part: TrialPart) -> dict[str, Any]:
    """Let a process for each device compute, and reduce with the partner's.

    Return `{seconds, why, rate, model, backend}`, of the slowest device: `seconds` are those of one reduction, None
    where none came about; `rate` is in products per second, `model` what the device is. Returns within the backend's
    limit and a margin.

    The processes are forked from this one, which has torch loaded and nothing else: a round then costs no import, and
    a driver or a collective that hangs costs a process that can be killed.
    """
    ends = time.monotonic() + LIMIT_S[part.backend] + MARGIN_S
    children = []
    for number in range(len(part.devices)):
        answer, tell_us = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_device_main, args=(part, number, tell_us))
        child.start()
        tell_us.close()
        children.append((child, answer))
    answers = [_answer(answer, ends) for _, answer in children]
    codes = _end([child for child, _ in children])
    told = [answer or {**_FAILED, "why": _death(code)} for answer, code in zip(answers, codes, strict=True)]
    whys = [answer["why"] for answer in told if answer["why"]]
    seconds, rates = ([answer[name] for answer in told] for name in ("seconds", "rate"))
    slowest = told[0] if None in rates else min(told, key=lambda answer: float(answer["rate"]))
    return {
        "seconds": None if whys or None in seconds else max(seconds),
        "why": "; ".join(dict.fromkeys(whys)),
        "rate": None if None in rates else slowest["rate"],
        "model": slowest["model"],
        "backend": part.backend,
    }


def _device_main(part: TrialPart, number: int, tell_us: Connection) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S[part.backend] + 2 * MARGIN_S)  # should our parent be killed
        tell_us.send(_perform(part, number))
    finally:
        os._exit(0)  # no destructor: that of a process group may wait for a partner that is gone


def _answer(pipe: Connection, ends: float) -> dict[str, Any] | None:
    """Return what the process of a device tells until `ends` (monotonic), None where it tells nothing."""
    with pipe, contextlib.suppress(EOFError):
        if pipe.poll(max(0.0, ends - time.monotonic())):
            return dict(pipe.recv())
    return None


def _end(children: Sequence[BaseProcess]) -> list[int | None]:
    """Kill processes and return their exit codes, None for each that is stuck in the kernel; that is left alone.

    All together, so that several that are stuck take no longer than one: the partner waits for this node's answer.
    """
    for child in children:
        child.kill()
    ends = time.monotonic() + _COLLECT_S
    for child in children:
        child.join(max(0.0, ends - time.monotonic()))
    return [child.exitcode for child in children]


def _death(code: int | None) -> str:
    killed = code in (None, 0, -signal.SIGKILL)
    return f"its process {'did not answer in time' if killed else f'died by signal {-(code or 0)}'}"


def _perform(part: TrialPart, number: int) -> dict[str, Any]:
    """Compute and reduce on one device; runs in a process of its own."""
    result, device = dict(_FAILED), part.devices[number]
    try:
        import torch

        torch.set_num_threads(1)  # each node alike, and none held up by what else its neighbours run
        if device != CPU:
            torch.cuda.set_device(device)
        result["model"] = processor_model() if device == CPU else torch.cuda.get_device_name(device)
        result["rate"] = round(_rate(torch, part.backend, device), 3)
        result["seconds"] = round(_reduce(torch, part, number, device), 6)
    except Exception as error:  # noqa: BLE001 - whatever it is, this is how the trial went
        result["why"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_WHY]
    return result


def _rate(torch: Any, backend: str, device: str) -> float:
    """Return how many products of two matrices the device computes per second; raises ValueError for a wrong one."""
    size = _SIZE[backend]
    kind = torch.float32 if device == CPU else torch.bfloat16
    left, right = (compute.matrix(torch, size, salt, device).to(kind) for salt in (1, 2))
    found = compute.checksum(torch, left @ right)
    if found != compute.CHECKSUMS[size]:
        raise ValueError(f"{device}: a product of known checksum {compute.CHECKSUMS[size]} came out as {found}")
    began, times = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < _COMPUTE_S or not times:
        torch.matmul(left, right)
        if device != CPU:
            torch.cuda.synchronize()
        times += 1
    return times / took


def _reduce(torch: Any, part: TrialPart, number: int, device: str) -> float:
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
