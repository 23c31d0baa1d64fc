"""Words for the journal's events: one short sentence for each that a person cares about, and the newest of them.

Events may be of another version, and their fields of any type: what cannot be understood is left out of the sentence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.resume_limits import read_limits
from resilience_sdk.core.resume_proof import ResumeCheck
from resilience_sdk.core.words import duration, one_line
from resilience_sdk.incidents.record import count_words, ranks_words

_Told = Mapping[str, Any]
_SAME_S = 60.0  # each node tells of an attempt, a stop and a decision; they are told once


def sentence(event: Mapping[str, Any]) -> str | None:
    """Return what happened in plain words; None for what is of no interest to whoever only looks on."""
    tell = _SENTENCES.get(str(event.get("event")))
    words = tell(event) if tell is not None else None
    return one_line(words or "") or None


@attrs.define
class NewestEvents:
    """The newest sentences: each once within a minute, however many nodes tell it; of a stall the last notice."""

    most: int = 32
    _kept: deque[tuple[float, str, str]] = attrs.field(factory=deque)

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take events in the order of their times."""
        for event in events:
            words = sentence(event)
            if words is None:
                continue
            at, name = float(event["t"]), str(event["event"])
            if name == Event.STALL.value and self._kept and self._kept[-1][1] == name:
                self._kept.pop()
            if not any(words == told and at - before < _SAME_S for before, _, told in self._kept):
                self._kept.append((at, name, words))
                while len(self._kept) > self.most:
                    self._kept.popleft()

    def all(self) -> tuple[tuple[float, str, str], ...]:
        """Return time, name and sentence of each, oldest first."""
        return tuple(self._kept)


def _text(event: _Told, *keys: str) -> str:
    """Return the first of these fields that is a text and says something."""
    return next((value for key in keys if isinstance(value := event.get(key), str) and value.strip()), "")


def _number(event: _Told, key: str) -> float | None:
    value = event.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if is_number else None  # type: ignore[arg-type]


def _count(event: _Told, key: str) -> int | None:
    number = _number(event, key)
    return None if number is None else int(number)


def _after(event: _Told) -> str:
    step = _count(event, "step")
    return "" if step is None else f" after {count_words(step)}"


def _because(event: _Told, *keys: str) -> str:
    why = _text(event, *keys)
    return f": {why}" if why else ""


def _run_start(event: _Told) -> str:
    host = _text(event, "host")
    return "the job starts" + (f", its launcher on {host}" if host else "")


def _attempt_start(event: _Told) -> str:
    attempt, size = _count(event, "attempt"), _count(event, "world_size")
    name = "an attempt" if attempt is None else f"attempt {attempt}"
    nodes = _count(event, "nodes") or 1
    ranks = "" if size is None else f" with {size} rank{'' if size == 1 else 's'}"
    return f"{name} begins{ranks}" + (f" on {nodes} nodes" if nodes > 1 else "")


def _rank_exit(event: _Told) -> str | None:
    rank, code, signal = _count(event, "rank"), _count(event, "exit_code"), _text(event, "signal")
    if rank is None or event.get("ended_by_launcher") or (code == 0 and not signal):
        return None
    ending = f"was ended by {signal}" if signal else "is gone" if code is None else f"left with exit code {code}"
    return f"rank {rank} {ending}"


_ENDINGS = {
    "ranks": "its ranks ended",
    "hang": "it hung",
    "server": "its fork server was killed",
    "preemption": "it was asked to leave",
    "interrupt": "it was interrupted",
    "membership": "a node joined",
}


def _attempt_end(event: _Told) -> str | None:
    by, attempt = _text(event, "ended_by"), _count(event, "attempt")
    return None if not by or attempt is None else f"attempt {attempt} is over: {_ENDINGS.get(by, by)}"


def _decision(event: _Told) -> str | None:
    verdict, reason = _text(event, "verdict"), _text(event, "reason")
    verdict = verdict.replace("_", " ")
    return f"{verdict}: {reason}" if verdict and not reason.startswith(verdict) and reason else reason or verdict


def _recovered(event: _Told) -> str:
    took_s, lost = _number(event, "recovery_s"), _count(event, "lost_steps")
    words = f"{_text(event, 'id') or 'an incident'} is over"
    words += "" if took_s is None else f", all ranks step again after {duration(max(0.0, took_s))}"
    return words + (f", {count_words(lost)} lost" if lost else "")


def _stall_end(event: _Told) -> str | None:
    after_s = _number(event, "after_s")
    return f"went on after {duration(max(0.0, after_s))}" if event.get("why") == "went on" and after_s else None


def _straggler(event: _Told) -> str | None:
    what, text = _text(event, "what"), _text(event, "text")
    told = {"found": "slow", "still": "still slow", "over": "no longer slow", "settings": "changed", "load": "load"}
    return f"{told[what]}: {text}" if what in told and text else None


def _commit(event: _Told) -> str:
    took_s = _number(event, "seconds")
    return f"checkpoint{_after(event)} is whole" + ("" if took_s is None else f", in {duration(max(0.0, took_s))}")


def _notice(event: _Told) -> str:
    asked = _text(event, "source", "kind") or "somebody"
    return f"asked to stop by {asked}{_because(event, 'reason')}"


def _health(event: _Told) -> str | None:
    if event.get("ok") is not False:
        return None
    return f"health of {_text(event, 'host') or 'a node'}: {_text(event, 'what')}{_because(event, 'why')}"


def _numerics(event: _Told) -> str | None:
    what, found, rank, step = _text(event, "what"), _text(event, "found"), _count(event, "rank"), _count(event, "step")
    at = "" if step is None else f" at step {step}"
    if found == "good":
        return f"the numbers are good again{at}"
    on = "" if rank is None else f" on rank {rank}"
    return f"{what} is {_text(event, 'value') or found}{at}{on}" if what and found else None


def _ranks(event: _Told) -> str:
    ranks = event.get("ranks")
    known = [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else []
    return ranks_words(known) if known else ""


def _signal_sent(event: _Told) -> str | None:
    return f"{_text(event, 'signal')} to {ranks}{_because(event, 'why')}" if (ranks := _ranks(event)) else None


def _degraded(event: _Told) -> str:
    words = f"{_text(event, 'what') or 'the SDK'}{_because(event, 'why', 'message')}".partition("\n")[0]
    return words + (f" ({ranks})" if (ranks := _ranks(event)) else "")


def _resume_limit(event: _Told) -> str | None:
    for limit in read_limits([event]):
        return limit.words(at_resume=event.get("at_resume") is True)
    return None


_SENTENCES: Mapping[str, Callable[[_Told], str | None]] = {
    Event.RUN_START.value: _run_start,
    Event.ATTEMPT_START.value: _attempt_start,
    Event.ATTEMPT_END.value: _attempt_end,
    Event.RANK_EXIT.value: _rank_exit,
    Event.STALL.value: lambda event: _text(event, "text") or None,
    Event.STALL_END.value: _stall_end,
    Event.SIGNAL_SENT.value: _signal_sent,
    Event.INCIDENT.value: lambda event: f"incident {_text(event, 'id')}{_because(event, 'summary', 'cause')}",
    Event.RECOVERED.value: _recovered,
    Event.DECISION.value: _decision,
    Event.CKPT_COMMIT.value: _commit,
    Event.CKPT_FAIL.value: lambda event: f"checkpoint{_after(event)} failed{_because(event, 'error', 'why')}",
    Event.CKPT_SKIP.value: lambda event: f"checkpoint{_after(event)} left out{_because(event, 'why')}",
    Event.CKPT_QUARANTINE.value: lambda event: f"checkpoint{_after(event)} in quarantine{_because(event, 'why')}",
    Event.RESUME.value: lambda event: f"resumed{_after(event)}",
    Event.RESUME_LIMIT.value: _resume_limit,
    Event.RESUME_NOT_EXACT.value: lambda event: check.line if (check := ResumeCheck.from_event(event)) else None,
    Event.PREEMPT_NOTICE.value: _notice,
    Event.STOP_AGREED.value: lambda event: f"all ranks stop together{_after(event)}",
    Event.STRAGGLER.value: _straggler,
    Event.NUMERICS.value: _numerics,
    Event.HEALTH.value: _health,
    Event.MONITOR_REPLACED.value: lambda event: f"the monitor on {_text(event, 'host') or 'a node'} was replaced",
    Event.DEGRADED.value: _degraded,
    Event.FINISHED.value: lambda _: "training is complete",
}
