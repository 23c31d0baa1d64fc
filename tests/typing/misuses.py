"""Mistakes that a type checker finds before the job does: an error to mypy and to pyright each, and to stay one."""

from __future__ import annotations

import resilience_sdk
from resilience_sdk import checkpoint, faults, heartbeat, numerics, preemption, straggler
from resilience_sdk.adapters import pytorch


@straggler.section("fwd")
def forward(batch: int) -> float:
    """A decorated function keeps its parameters."""
    return float(batch)


forward("no batch")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
heartbeat(step="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
straggler.section("fwd", timeout="30s")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
straggler.section("fwd", "compute")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
numerics.check(loss=0.5, policy="stop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
numerics.check(0.5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
preemption.request()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
checkpoint.Checkpointer({}, "runs/a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
faults.inject("hang", 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
pytorch.attach(object(), object(), first_step="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
print(straggler.report().stragglers)  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
with resilience_sdk.start_run("runs/a") as run:
    run.steps([1, 2], on_preempt="stop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    print(run.epoch_count)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
