"""Whether the timeouts around a job go off in the right order: ours, the process group's, the scheduler's. Pure.

deadline of a step or section  <  timeout of the process group  <  what is left of the job
retries of InfiniBand          <  timeout of the process group
collecting evidence + SIGTERM to SIGKILL  <=  what scheduler and elastic give between the two
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from resilience_sdk.environ import INTERNAL_JOB
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.preemption.scheduler import end_time
from resilience_sdk.settings import Settings

PROBE = "software"
# Defaults of torch.distributed for `init_process_group(timeout=None)`.
NCCL_TIMEOUT_S, OTHER_TIMEOUT_S = 600.0, 1800.0
KILL_WAIT_S = 30.0  # default of Slurm's KillWait, and of elastic's shutdown_timeout
# InfiniBand: 4.096 us * 2^timeout for each of the tries. NCCL's own defaults.
_IB_UNIT_S, _IB_TIMEOUT, _IB_RETRIES = 4.096e-6, 20, 7
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


@attrs.frozen
class _Disorder:
    """One pair of timeouts that go off in the wrong order."""

    subject: str
    value_s: float
    limit_s: float
    evidence: str
    cure: str


def order(settings: Settings, env: Mapping[str, str], *, has_gpus: bool, now_unix: float) -> Iterator[Finding]:
    """Yield a finding for each pair that is in the wrong order, or one that all are right.

    Only deadlines that somebody set are compared: learned ones keep below the process group's by themselves.
    """
    found = [
        *_before_the_group(settings, env, has_gpus),
        *_before_the_end(settings, env, now_unix),
        *_before_the_kill(settings, env),
    ]
    if not found:
        yield Finding(probe=PROBE, check="timeouts", status=Status.OK, evidence="they go off in the right order")
    for disorder in found:
        yield Finding(
            probe=PROBE,
            check="timeouts",
            subject=disorder.subject,
            status=Status.DEGRADED,
            value=disorder.value_s,
            unit="s",
            threshold=disorder.limit_s,
            evidence=disorder.evidence,
            cure=disorder.cure,
        )


def _before_the_group(settings: Settings, env: Mapping[str, str], has_gpus: bool) -> Iterator[_Disorder]:
    group_s, group = (NCCL_TIMEOUT_S, "NCCL") if has_gpus else (OTHER_TIMEOUT_S, "gloo")
    for name, deadline_s in _deadlines(settings).items():
        if deadline_s >= group_s:
            yield _Disorder(
                name,
                deadline_s,
                group_s,
                f"{deadline_s:g} s, and torch ends the ranks {group_s:g} s into a collective ({group}'s default): then "
                "a hang is seen as their death",
                f"set it below {group_s:g}, or pass a longer timeout= to init_process_group",
            )
    heartbeat_s = _number(env.get(_HEARTBEAT))
    longest = max(_deadlines(settings).values(), default=0.0)
    if heartbeat_s is not None and env.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0" and longest >= heartbeat_s:
        yield _Disorder(
            _HEARTBEAT,
            heartbeat_s,
            longest,
            f"{heartbeat_s:g} s: NCCL's watchdog may abort a stuck rank before our deadline of {longest:g} s",
            f"raise {_HEARTBEAT} above {longest:g}",
        )
    exponent, tries = _number(env.get("NCCL_IB_TIMEOUT")), _number(env.get("NCCL_IB_RETRY_CNT"))
    if exponent is not None or tries is not None:
        used, count = _IB_TIMEOUT if exponent is None else exponent, _IB_RETRIES if tries is None else tries
        retries_s = _IB_UNIT_S * 2.0 ** min(used, 31.0) * count
        if retries_s >= NCCL_TIMEOUT_S:
            yield _Disorder(
                "NCCL_IB_TIMEOUT",
                retries_s,
                NCCL_TIMEOUT_S,
                f"InfiniBand tries for {retries_s:.0f} s before it tells of a broken path; by then NCCL's watchdog has "
                f"ended the ranks ({NCCL_TIMEOUT_S:g} s), and nobody says which path",
                f"lower NCCL_IB_TIMEOUT to {_IB_TIMEOUT} (and NCCL_IB_RETRY_CNT to {_IB_RETRIES})",
            )


def _before_the_end(settings: Settings, env: Mapping[str, str], now_unix: float) -> Iterator[_Disorder]:
    end = end_time(env, now_unix)
    if end is None:
        return
    left_s = end - now_unix
    for name, deadline_s in {**_deadlines(settings), "preempt_time": settings.preempt_time}.items():
        if deadline_s >= left_s:
            yield _Disorder(
                name,
                deadline_s,
                round(left_s),
                f"{deadline_s:g} s, and the scheduler ends the job in {left_s:.0f} s",
                "ask the scheduler for more time (`--time`), or set it lower",
            )


def _before_the_kill(settings: Settings, env: Mapping[str, str]) -> Iterator[_Disorder]:
    ours_s = settings.dump_grace + settings.term_grace
    if ours_s > KILL_WAIT_S and "SLURM_JOB_ID" in env:
        yield _Disorder(
            "term_grace",
            ours_s,
            KILL_WAIT_S,
            f"evidence and SIGTERM take {ours_s:g} s, and Slurm kills {KILL_WAIT_S:g} s after its own (KillWait)",
            f"set term_grace to {max(0.0, KILL_WAIT_S - settings.dump_grace):g} or less",
        )
    is_torchruns = "TORCHELASTIC_RUN_ID" in env and INTERNAL_JOB not in env
    # Where nobody set it, what torchrun gives is known without.
    if is_torchruns and settings.preempt_time > KILL_WAIT_S and "preempt_time" in settings.explicit:
        yield _Disorder(
            "preempt_time",
            settings.preempt_time,
            KILL_WAIT_S,
            f"{settings.preempt_time:g} s, and torchrun kills the ranks {KILL_WAIT_S:g} s after it passed SIGTERM on",
            f"set preempt_time to {KILL_WAIT_S:g} or less, or start with `resilience run`",
        )


def _deadlines(settings: Settings) -> dict[str, float]:
    """Return the deadlines that somebody set, by what they are called."""
    named = {
        "heartbeat_timeout": settings.heartbeat_timeout,
        "initial_heartbeat_timeout": settings.initial_heartbeat_timeout,
        "out_of_section_timeout": settings.out_of_section_timeout,
        **{f"section_timeouts {name}": value for name, value in settings.section_timeouts.items()},
    }
    return {name: value for name, value in named.items() if value is not None}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
