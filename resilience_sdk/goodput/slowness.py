"""One sentence on why the steps of a run take what they take, with its evidence; nothing below that. Pure.

Each rule names a share of the step that was measured, and what is done about such a thing. The first one that holds is
told: data before everything else, since whatever waits for it looks slow as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.goodput.step_time import StepTime, is_data, is_save
from resilience_sdk.recorder.page_layout import BEAT_KINDS

LEAST_STEPS = 20
LEAST_WALL_S = 5.0
_DATA, _DATA_OF_ONE = 0.3, 0.3
_SAVES = 0.1
_COMM = 0.5
_OPTIM = 0.5
_GPU_BUSY = 0.4
_FIXED = 0.7
_OUTSIDE = 0.3
_SLOW_RANK = 0.1
ON_HOST = ("compute", "comm", "io", "idle")
"""The kinds of sections that take time of the thread that trains, one after the other."""
_SAME = 0.5  # of the mean that the least rank has at least, for a thing to be that of all ranks


@attrs.frozen
class WhySlow:
    """Why steps are slow. `cause`: `data`, `checkpoint`, `slow_rank`, `communication`, `small_batch`, `between`."""

    cause: str
    share: float
    """Part of the time that it takes, 0 to 1."""
    text: str
    evidence: Mapping[str, Any]


def slowness_of(steps: StepTime | None, verdicts: Sequence[Mapping[str, Any]] = ()) -> WhySlow | None:
    """Return why steps are slow; None where too little was measured, or nothing stands out.

    Args:
        steps: What was measured of the newest attempt.
        verdicts: The stragglers that stand now, as `straggler` events have them.
    """
    if steps is None or steps.steps < LEAST_STEPS or steps.wall_s < LEAST_WALL_S:
        return None
    found = (rule(steps) for rule in (_data, _data_of_one, _saves))
    first = next((slow for slow in found if slow is not None), None)
    if first is not None:
        return first
    if (slow := _slow_rank(steps, verdicts)) is not None:
        return slow
    later: tuple[Callable[[StepTime], WhySlow | None], ...] = (_comm, _optim, _gpu, _fixed, _between)
    return next((slow for rule in later if (slow := rule(steps)) is not None), None)


def standing_of(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the persistent verdicts on slow ranks that stand after `events`, of the newest attempt."""
    standing: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for event in events:
        name = event.get("event")
        if name in (Event.RUN_START.value, Event.ATTEMPT_START.value):
            standing.clear()
        elif name == Event.STRAGGLER.value and event.get("what") in ("found", "still", "over"):
            key = str(event.get("section")), str(event.get("role")), str(event.get("ranks"))
            standing.pop(key, None)
            if event.get("what") != "over" and event.get("kind") == "persistent":
                standing[key] = event
    return list(standing.values())


def _told(steps: StepTime, cause: str, share: float, text: str, **evidence: Any) -> WhySlow:
    facts = {"steps": steps.steps, "step_s": round(steps.step_s, 6), "ranks": steps.ranks, **evidence}
    return WhySlow(cause, round(share, 4), text, facts)


def _whose(steps: StepTime, least: float, share: float) -> str:
    if steps.ranks == 1:
        return ""
    return " on all ranks" if least >= _SAME * share else " on average over the ranks"


def _data(steps: StepTime) -> WhySlow | None:
    data = steps.section(("io", "compute", "idle"), is_data)
    if data is None or data.share < _DATA:
        return None
    return _told(
        steps, "data", data.share,
        f"{data.share:.0%} of the step waits for data{_whose(steps, data.least, data.share)} (section {data.name}): "
        f"more DataLoader workers (num_workers), or less work per sample",
        section=data.name, least=data.least, most=data.most,
    )  # fmt: skip


def _data_of_one(steps: StepTime) -> WhySlow | None:
    data = steps.section(("io", "compute", "idle"), is_data)
    if data is None or steps.ranks < 2 or data.most < _DATA_OF_ONE:
        return None
    return _told(
        steps, "data", data.most,
        f"rank {data.rank} waits for its data {data.most:.0%} of the step (section {data.name}), the ranks' mean is "
        f"{data.share:.0%}: all others wait for it; look at the storage and the load of its node",
        section=data.name, rank=data.rank, least=data.least, most=data.most,
    )  # fmt: skip


def _saves(steps: StepTime) -> WhySlow | None:
    saves = steps.section(("io", "compute"), is_save)
    if saves is None or saves.most < _SAVES:
        return None
    return _told(
        steps, "checkpoint", saves.most,
        f"saves take {saves.most:.0%} of the time since the first step (section {saves.name}): save less often "
        f"(checkpoint_every=auto weighs it, so does `resilience plan`), or in the background",
        section=saves.name, rank=saves.rank, most=saves.most,
    )  # fmt: skip


def _slow_rank(steps: StepTime, verdicts: Sequence[Mapping[str, Any]]) -> WhySlow | None:
    for verdict in verdicts:
        share, ranks = verdict.get("share"), verdict.get("ranks")
        if isinstance(share, (int, float)) and share >= _SLOW_RANK and isinstance(ranks, (list, tuple)) and ranks:
            return _told(
                steps, "slow_rank", float(share),
                f"all ranks wait for {verdict.get('text')}",
                section=verdict.get("section"), slow_ranks=list(ranks), nodes=verdict.get("nodes"),
                ratio=verdict.get("ratio"),
            )  # fmt: skip
    return None


def _comm(steps: StepTime) -> WhySlow | None:
    comm = steps.section(("comm", "gpu_comm"))
    if comm is None or comm.share < _COMM or comm.least < _SAME * comm.share:
        return None
    return _told(
        steps, "communication", comm.share,
        f"{comm.share:.0%} of the step is communication{_whose(steps, comm.least, comm.share)} (section {comm.name}): "
        f"more work per step (a larger batch, gradient accumulation), or a faster network",
        section=comm.name, least=comm.least, most=comm.most,
    )  # fmt: skip


def _optim(steps: StepTime) -> WhySlow | None:
    # With a GPU the host's time tells when it was let go on: at a synchronisation it waits for all that came before.
    kind = "gpu" if any(section.kind == "gpu" for section in steps.sections) else "compute"
    optim = steps.section((kind,), lambda name, _: name == "optim" or name.endswith(".optim"))
    if optim is None or optim.share < _OPTIM:
        return None
    return _told(
        steps, "small_batch", optim.share,
        f"{optim.share:.0%} of the step is the optimizer's (section {optim.name}), which takes as long for any batch: "
        f"a larger batch or gradient accumulation, or a fused optimizer",
        section=optim.name, least=optim.least, most=optim.most,
    )  # fmt: skip


def _gpu(steps: StepTime) -> WhySlow | None:
    busy = sum(section.share for section in steps.sections if section.kind in ("gpu", "gpu_comm"))
    host = sum(section.share for section in steps.sections if section.kind == "compute")
    if not any(section.kind == "gpu" for section in steps.sections) or busy >= _GPU_BUSY or host < 0.5:
        return None
    return _told(
        steps, "small_batch", 1.0 - busy,
        f"the GPU works {busy:.0%} of the step, the host launches during {host:.0%} of it: a larger batch, "
        f"torch.compile or CUDA graphs",
        gpu=round(busy, 4), host=round(host, 4),
    )  # fmt: skip


def _fixed(steps: StepTime) -> WhySlow | None:
    if steps.fixed_share is None or steps.fixed_share < _FIXED:
        return None
    return _told(
        steps, "small_batch", steps.fixed_share,
        f"{steps.fixed_share:.0%} of a step does not grow with its work (as straggler.work tells it): a larger batch "
        f"costs little more",
        fixed_share=steps.fixed_share,
    )  # fmt: skip


def _between(steps: StepTime) -> WhySlow | None:
    inside = sum(section.share for section in steps.sections if section.kind == BEAT_KINDS[0])
    data = [s.share for s in steps.sections if is_data(s.name, s.kind)]
    known = sum(data) + sum(s.share for s in steps.sections if is_save(s.name, s.kind))
    # What all sections take beyond the time inside passes outside of it, and is known: an evaluation, say.
    told = sum(section.share for section in steps.sections if section.kind in ON_HOST)
    outside = 1.0 - inside - max(known, told - inside)
    if not inside or outside < _OUTSIDE:
        return None
    where = (
        f"and is no wait for data ({sum(data):.0%}): a section around what happens there (a save, an evaluation, a log)"
        if data
        else "where a loop fetches its next batch: straggler.iterate(loader), or a section around what happens there,"
    )
    return _told(
        steps, "between", outside,
        f"{outside:.0%} of the time since the first step passes between two steps, outside of heartbeat(), {where} "
        f"tells what it is",
        inside=round(inside, 4),
    )  # fmt: skip
