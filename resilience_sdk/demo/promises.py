"""What must be true after each run of the demo. Pure: values in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.errors import EXIT_PREEMPTED
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
        return None if self.fault is None else _INCIDENTS[self.fault.kind]

    @property
    def stops(self) -> bool:
        """Whether the job leaves, to be started again by whoever asked it to."""
        return self.fault is not None and self.fault.kind == "preempt"


_INCIDENTS = {"hang": "hang", "kill": "crash", "preempt": "preemption"}

# Blocked in C and past every signal handler; dead without a word; asked to leave. All between two checkpoints.
SCENARIOS = (
    Scenario("undisturbed"),
    Scenario("hung", Plan("hang", "c", rank=1, step=40)),
    Scenario("killed", Plan("kill", "sigkill", rank=0, step=90)),
    Scenario("preempted", Plan("preempt", rank=1, step=60)),
)


@attrs.frozen
class Outcome:
    """What one run left behind. `results`: what each rank wrote at its end, by rank."""

    exit_code: int | None  # None: it was still running when its time was up
    seconds: float
    results: Mapping[int, Mapping[str, Any]]
    incidents: tuple[Incident, ...]
    first_exit_code: int | None = None
    """How the first start of a job left that was then started again."""


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
    if scenario.stops:
        return broken + _stop(fault.step or 0, outcome)
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


def _stop(asked_at: int, outcome: Outcome) -> list[str]:
    """Hold a stop against what was promised: agreed soon, saved, and nothing lost."""
    broken = []
    if outcome.first_exit_code != EXIT_PREEMPTED:
        broken.append(f"it stopped with code {outcome.first_exit_code}, not {EXIT_PREEMPTED}")
    if (lost := outcome.incidents[0].lost_steps) != 0:
        broken.append(f"it counted {lost} lost steps, not 0")
    first_steps = {result.get("first_step") for result in outcome.results.values()}
    if len(first_steps) > 1 or not all(isinstance(step, int) and step > asked_at for step in first_steps):
        broken.append(f"it went on at step {first_steps}, not at one after step {asked_at}, when it was asked to leave")
    return broken
