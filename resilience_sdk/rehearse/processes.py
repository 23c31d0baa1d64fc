"""The number of processes that a script is, by what an undisturbed run of several has shown. Pure."""

from __future__ import annotations

import attrs

from resilience_sdk.rehearse.plan import JobFacts

RANKS, ONE, OWN, UNKNOWN = "ranks", "one", "own", "unknown"


@attrs.frozen
class Processes:
    """What a script makes of the processes that it is started as."""

    kind: str = UNKNOWN
    """`ranks`: they join one another. `one`: each would be a copy. `own`: each starts ranks itself. Else `unknown`."""
    ranks: int = 1
    """As how many it is rehearsed."""
    words: str | None = None
    """What is said of it, where that is not as many as were asked for."""
    is_trial: bool = False
    """Whether one process is only tried, as several have failed."""


def decide(facts: JobFacts, ranks: int) -> Processes:
    """Return as how many processes a script is rehearsed that was run undisturbed by `ranks` of them."""
    traces = facts.last_attempt
    sizes = [trace.group for trace in traces if trace.group is not None]
    if any(sizes):
        return Processes(RANKS, ranks)
    starter = next((trace.started for trace in traces if trace.started and not trace.steps), None)
    if starter is not None:
        words = (
            f"the script starts its processes by itself ({starter}): it is run once. They are no ranks of the "
            "launcher, so no step of theirs is seen, and no fault can strike in them"
        )
        return Processes(OWN, 1, words)
    if any(trace.alone for trace in traces):
        told = None
        if ranks > 1:
            told = (
                f"the script is one process: none of {ranks} had joined a process group at its first step, so they "
                "would be copies that share its files. They were ended before that step; it is rehearsed as one"
            )
        return Processes(ONE, 1, told)
    if ranks > 1 and facts.exit_codes[-1] != 0:
        return Processes(
            ONE,
            1,
            f"{ranks} processes fail, and none was seen to join a process group: once more as one",
            is_trial=True,
        )
    return Processes(UNKNOWN, ranks)


def why_none_is_struck(found: Processes) -> str | None:
    """Return why no fault can be rehearsed of a script that starts its own processes; None for any other."""
    if found.kind != OWN:
        return None
    return (
        "the script starts its processes by itself, and they are no ranks of the launcher: let it read RANK and "
        "WORLD_SIZE in place of that, and start it by resilience run --nproc-per-node N"
    )
