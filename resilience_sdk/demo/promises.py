"""What must be true after each run of the demo. Pure: values in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.faults import Plan
from resilience_sdk.incidents.record import Incident

RANKS = 2
CHECKPOINT_EVERY = 25


@attrs.frozen
class Scenario:
    """One run of the demo, and the fault that strikes in it."""

    name: str
    fault: Plan | None = None

    @property
    def incident_kind(self) -> str | None:
        """What the run directory must call it."""
        return None if self.fault is None else {"hang": "hang", "kill": "crash"}[self.fault.kind]


# Blocked in C and past every signal handler; dead without a word. Both in the middle between two checkpoints.
SCENARIOS = (
    Scenario("undisturbed"),
    Scenario("hung", Plan("hang", "c", rank=1, step=40)),
    Scenario("killed", Plan("kill", "sigkill", rank=0, step=90)),
)


@attrs.frozen
class Outcome:
    """What one run left behind. `results`: what each rank wrote at its end, by rank."""

    exit_code: int | None  # None: it was still running when its time was up
    seconds: float
    results: Mapping[int, Mapping[str, Any]]
    incidents: tuple[Incident, ...]


def broken_promises(scenario: Scenario, outcome: Outcome, reference: Outcome) -> list[str]:
    """Return one sentence per promise that did not hold; empty when all of them did."""
    broken = _ending(outcome)
    if scenario.fault is None:
        if outcome.incidents:
            broken.append(f"nothing was wrong, and {len(outcome.incidents)} incidents were reported")
        return broken
    if len(outcome.incidents) != 1:
        broken.append(f"{len(outcome.incidents)} incidents were reported for one fault")
    if outcome.incidents:
        broken += _report(scenario, outcome)
    for rank, result in outcome.results.items():
        for what in ("loss", "parameters"):
            expected = reference.results.get(rank, {}).get(what)
            if result.get(what) != expected:
                broken.append(f"rank {rank} ended with other {what}: {result.get(what)}, not {expected}")
    return broken


def _ending(outcome: Outcome) -> list[str]:
    if outcome.exit_code is None:
        return [f"it did not end within {outcome.seconds:.0f} s"]
    broken = [] if outcome.exit_code == 0 else [f"it left with code {outcome.exit_code}"]
    missing = [str(rank) for rank in range(RANKS) if rank not in outcome.results]
    return broken + ([f"no result from rank {', '.join(missing)}"] if missing else [])


def _report(scenario: Scenario, outcome: Outcome) -> list[str]:
    """Hold the report against the fault that is known to have struck."""
    fault, incident = scenario.fault, outcome.incidents[0]
    assert fault is not None
    broken = []
    if incident.kind != scenario.incident_kind:
        broken.append(f"it was called {incident.kind}, not {scenario.incident_kind}")
    named = [culprit.rank for culprit in incident.culprits]
    if named != [fault.rank]:
        broken.append(f"it named rank {named or 'nobody'}, not {fault.rank}")
    if incident.detection_latency_s is None:
        broken.append("it does not say how long detection took")
    if incident.recovery_s is None:
        broken.append("it does not say when training went on")
    first_steps = {result.get("first_step") for result in outcome.results.values()}
    resumed_at = (fault.step or 0) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    if outcome.results and first_steps != {resumed_at}:
        broken.append(f"it went on at step {first_steps}, not at the checkpoint of step {resumed_at}")
    if incident.lost_steps != (fault.step or 0) - resumed_at:
        broken.append(f"it counted {incident.lost_steps} lost steps, not {(fault.step or 0) - resumed_at}")
    return broken
