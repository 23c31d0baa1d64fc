"""What users write, and of what type it is: read by mypy and pyright (tests/integration/test_typing.py), never run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from typing_extensions import assert_type

import resilience_sdk
from resilience_sdk import attribution, checkpoint, faults, health, heartbeat, numerics, preemption, straggler
from resilience_sdk.adapters import accelerate, deepspeed, lightning, megatron, pytorch, transformers
from resilience_sdk.straggler.reports import Report

Batch = tuple[list[float], int]


@heartbeat
def bare(batch: Batch) -> str:
    """A decorated function is what it was, without parentheses,"""
    return str(batch)


@heartbeat("evaluation")
async def named(batch: Batch) -> str:
    """with them, and a coroutine function too."""
    return str(batch)


@straggler.section("fwd", kind="compute", timeout=30.0)
def forward(batch: Batch) -> float:
    """So is one that is a section,"""
    return float(batch[1])


@resilience_sdk.resilient
def train_step(model: Any, batch: Batch) -> float:
    """and a whole step."""
    return float(batch[1])


def decorated() -> None:
    """Arguments and results stay known."""
    assert_type(bare(([1.0], 2)), str)
    awaited: Coroutine[Any, Any, str] = named(([1.0], 2))
    awaited.close()
    assert_type(forward(([1.0], 2)), float)
    assert_type(train_step(object(), ([1.0], 2)), float)
    kept: Callable[[Batch], float] = forward
    assert_type(kept(([1.0], 2)), float)


def primitives(loader: Iterable[Batch], model: Any, optimizer: Any) -> None:
    """The loop of one's own."""
    handle = straggler.attach(model, optimizer)
    for batch in straggler.iterate(loader):
        assert_type(batch, Batch)
        with heartbeat(step=3), straggler.section("step", kind="compute"):
            train_step(model, batch)
        heartbeat.beat()
        if preemption.check():
            preemption.exit()
    handle.detach()
    with heartbeat.paused("an evaluation by hand"):
        assert_type(preemption.time_left(), float | None)
    heartbeat.done()
    assert_type(straggler.report(), Report | None)


def leaving() -> int:
    """What leaves does not come back: nothing has to be returned behind it."""
    preemption.exit()


def run_object(loader: Iterable[Batch], model: Any) -> None:
    """One object that does it all; settings are keywords."""
    with resilience_sdk.start_run("runs/a", state={"model": model}, stuck_after=60.0, checkpoint_every="10m") as run:
        for step, batch in run.steps(loader, epochs=2, max_steps=100, on_preempt="return"):
            assert_type(step, int)
            assert_type(batch, Batch)
        assert_type(run.epoch, int)
        assert_type(run.preempted, bool)
        run.values["best"] = 0.5
    assert_type(resilience_sdk.current_run(), resilience_sdk.Run)


def saving(model: Any) -> None:
    """Checkpoints without the run."""
    saver = checkpoint.Checkpointer({"model": model}, run_dir="runs/a", every=50, keep=3)
    assert_type(saver.resume(), int)
    assert_type(saver.maybe_save(1), bool)
    if saver.last_good is not None:
        assert_type(saver.last_good.step, int)


def looking() -> None:
    """What explains."""
    if not health.preflight().ok:
        return
    verdict = attribution.diagnose("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert_type(verdict.cause, str)
    trouble = numerics.check(loss=0.5, grad_norm=1.0, policy="rollback")
    if trouble is not None:
        assert_type(trouble.step, int)
    faults.inject("hang", rank=1, step=40)


def frameworks(model: Any, optimizer: Any, loader: Any, accelerator: Any, engine: Any, config: Any) -> None:
    """The adapters take the objects of their frameworks, whose types are theirs."""
    with pytorch.attach(model, optimizer, loader, first_step=0) as handle:
        assert_type(handle.step, int)
    assert_type(accelerate.attach(accelerator, "runs/a").step, int)
    assert_type(deepspeed.attach(engine, loader=loader).step, int)
    assert_type(megatron.attach(config, optimizer, first_step=3).step, int)
    callbacks: list[Any] = [lightning.ResilienceCallback(run_dir="runs/a"), transformers.ResilienceCallback()]
    assert len(callbacks) == 2


def errors() -> None:
    """Every error is one of the SDK's, and leaving is none."""
    try:
        decorated()
    except resilience_sdk.ConfigError as error:
        base: resilience_sdk.ResilienceError = error
        raise base from None
    except resilience_sdk.Preempted as left:
        leaves: SystemExit = left
        raise leaves from None
