"""The lines that a run ends with, also when all is well: how long it took, where the time went, what is worth a look.

The launcher has them made by a process of its own, as it does with the page: a journal may be long, and whoever waits
for the end of a job does not wait for its account.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from resilience_sdk.core.console import stay_light
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import counted, duration, one_line
from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.summary import AT_MOST
from resilience_sdk.incidents import count_words
from resilience_sdk.report.cards import GOOD_AGAIN
from resilience_sdk.report.facts import RunFacts
from resilience_sdk.report.read import read_run

_MIN_SHARE = 0.01  # of the wall time, for a bucket to be named
_MAX_BUCKETS = 4
_MAX_THINGS = 2
_MAX_TEXT = 240
_SAID = {"failed": "was not written", "skipped": "was not loaded", "quarantined": "is in quarantine"}


def main(run_dir: str) -> int:
    """Print the lines of a run directory and return 0."""
    stay_light()
    sys.stdout.write("".join(f"{line}\n" for line in summary_lines(read_run(RunDirectory(Path(run_dir))))))
    return 0


def summary_lines(facts: RunFacts) -> list[str]:
    """Return how long the run took and where its time went, and what is worth a look; nothing where nothing has run."""
    if not facts.goodput:
        return []
    return [_time(facts), *([look] if (look := _worth_a_look(facts)) else [])]


def _time(facts: RunFacts) -> str:
    wall_s, goodput = facts.goodput["wall_s"], facts.goodput["goodput"]
    buckets = facts.goodput["buckets"]
    attempts = len(facts.attempts) + facts.hidden_attempts
    words = f"time: {duration(wall_s)}" + (f" in {counted(attempts, 'attempt')}" if attempts > 1 else "")
    if goodput is not None:
        bound = AT_MOST if facts.goodput.get("at_most") else ""
        words += f", goodput {bound}{goodput:.0%}"
    rest = sorted(
        ((seconds, name) for name, seconds in buckets.items() if seconds and name != Bucket.PRODUCTIVE.value),
        reverse=True,
    )
    shown = [f"{name} {seconds / wall_s:.0%}" for seconds, name in rest if seconds >= _MIN_SHARE * wall_s]
    words += f" ({', '.join(shown[:_MAX_BUCKETS])})" if shown else ""
    return words + (f", {counted(lost, 'lost step')}" if (lost := facts.goodput["lost_steps"]) else "")


def _worth_a_look(facts: RunFacts) -> str | None:
    things = list(dict.fromkeys(one_line(thing)[:_MAX_TEXT] for thing in _things(facts)))
    if things:
        more = f"; and {len(things) - _MAX_THINGS} more" if len(things) > _MAX_THINGS else ""
        return f"worth a look: {'; '.join(things[:_MAX_THINGS])}{more}"
    if facts.headline.state != "finished":
        return None  # of a job that failed, what it failed of stands out
    if not facts.step_time:
        return "worth a look: no step was seen (heartbeat() around a step, or an adapter, shows where the time goes)"
    return "worth a look: nothing stood out"


def _things(facts: RunFacts) -> Iterator[str]:
    """Yield what may cost the user something if nobody looks at it, the gravest first."""
    bad = [save for save in facts.checkpoints if save.outcome != "committed"]
    if bad:
        after = "" if bad[-1].step is None else f" after {count_words(bad[-1].step)}"
        yield f"the checkpoint{after} {_SAID[bad[-1].outcome]}: {bad[-1].why or 'no reason is known'}"
    faults = [incident for incident in facts.incidents if incident.kind != "preemption"]
    if faults and facts.headline.state == "finished":  # of any other end they are the first thing said
        count = len(faults) + facts.hidden_incidents
        yield f"{counted(count, 'incident')} on the way, the last one: {faults[-1].headline}"
    for finding in facts.findings:
        if not finding.text.endswith(GOOD_AGAIN):
            yield f"{finding.node or 'the node'}: {finding.check}: {finding.text}"
    if facts.stragglers is not None and facts.stragglers.verdicts and facts.stragglers.verdicts[-1][1] != "over":
        yield facts.stragglers.verdicts[-1][2]
    yield from facts.memory_grows
    if facts.why_slow:
        yield facts.why_slow
    if facts.stood:
        yield facts.stood
