"""The cures of what a rehearsal has found: what to change, by the way in that the job has. Pure.

A cure is never a thing that the script does already: what it has saved and loaded was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rank.rehearsed_states import GENERATORS, OPTIMIZER, PLACE, SCHEDULER
from resilience_sdk.rehearse import components
from resilience_sdk.rehearse.components import Difference
from resilience_sdk.rehearse.resumes import Resume

ALL_OF_THE_STATE = "save and load all of the state: model, optimizer, scheduler, random numbers, the place in the data"
STATE_OF_EACH = (
    "save and load on every rank what is that rank's own: its part of a sharded state, its random numbers, its place "
    "in the data"
)
_ADAPTERS: Mapping[str, str] = {
    "lightning": "add resilience_sdk.adapters.lightning.ResilienceCallback() to the callbacks of the Trainer: it saves "
    "and restores this",
    "transformers": "add resilience_sdk.adapters.transformers.ResilienceCallback() to the callbacks of the Trainer: it "
    "saves and restores this",
    "accelerate": "call resilience_sdk.adapters.accelerate.attach(accelerator) behind prepare: it saves and "
    "restores this",
    "deepspeed": "call resilience_sdk.adapters.deepspeed.attach(engine, loader=loader) behind initialize: it saves and "
    "restores this",
    "megatron": "wrap pretrain by resilience_sdk.adapters.megatron.around(pretrain): see its page for what it restores",
}
PLACE_IN_THE_DATA = (
    "save and load the place in the data: use StatefulDataLoader of torchdata and keep its state_dict(), or skip the "
    "batches of the epoch that were done; steps of start_run go back by themselves"
)
_SAME_ORDER = (
    "let the data come in the same order again: samplers draw from torch's generators or from set_epoch(epoch), or the "
    "loader has a state_dict()"
)
_OF_THE_LOOP: Mapping[str, str] = {
    components.SAMPLES: PLACE_IN_THE_DATA,
    components.RATE: "save and load the scheduler's state_dict(), and step it at one place of the loop",
    components.WEIGHTS: "save and load all of model and optimizer, its momentum too, behind the same step",
    components.GENERATORS: "save and load the generators of Python, NumPy, torch and the device, and seed none of them "
    "behind the resume",
    components.LOSSES: "save and load what the step uses beside its weights: buffers, averages, generators of its own, "
    "the place in the data",
}


_LOAD_IT: Mapping[str, tuple[str, str, str]] = {
    components.SAMPLES: (
        PLACE,
        "load the loader's state, which is in the checkpoint, before the loop iterates it",
        "the loader's state is loaded: do that before the loop iterates it, in the epoch that it was saved in, and let "
        "the order of that epoch be drawn as it was",
    ),
    components.RATE: (
        SCHEDULER,
        "load the scheduler's state, which is in the checkpoint",
        "the scheduler's state is loaded: set no learning rate behind that, and step it at one place of the loop",
    ),
    components.WEIGHTS: (
        OPTIMIZER,
        "load the optimizer's state, which is in the checkpoint, too",
        "the optimizer's state is loaded: save all of the model, the scaler and averages behind the same step",
    ),
    components.GENERATORS: (
        GENERATORS,
        "load the states of the generators, which are in the checkpoint",
        "states of generators are loaded: do that last, on every rank its own, and seed none behind it",
    ),
}
"""By component: the kind of its state, and what helps where that is saved alone, and where it is loaded, too."""

_OF_RECORDS = (
    "save and load what the value is added up in, such as a metric or the state_dict() of a callback, and "
    "let an evaluation that is due be made behind the resume"
)
_LOAD_THE_NEWEST = "load the newest checkpoint at the start of the script"
_WRITE_ASIDE = "write each checkpoint under another name, rename it when it is whole, and keep the one before it"
_SAVE_AT_THE_STOP = (
    "where preemption.check() is True, save on the ranks that save, and call preemption.exit() behind it"
)
_STOP = (
    "call preemption.check() once per step on every rank; where it is True, save and call preemption.exit(). A handler "
    "of SIGTERM of the script's own has to call the one that was there before it"
)


_GIVEN_TO_ADAPTER: Mapping[tuple[str, str], str] = {
    ("accelerate", components.RATE): "give the scheduler to accelerator.prepare(), or to "
    "accelerator.register_for_checkpointing(), and step it at one place of the loop",
    ("accelerate", components.LOSSES): "give what the step uses beside model and optimizer to "
    "accelerator.register_for_checkpointing(): averages, teachers, generators of its own",
    ("lightning", components.RATE): "return the scheduler from configure_optimizers(): one that is stepped by hand is "
    "in no checkpoint",
    ("lightning", components.LOSSES): "keep what the step uses beside its weights in the module, as a buffer or "
    "submodule, or in its on_save_checkpoint() and on_load_checkpoint()",
    ("transformers", components.RATE): "let the Trainer have the scheduler (optimizers=(optimizer, scheduler)): one "
    "that is stepped elsewhere is in no checkpoint",
    ("transformers", components.LOSSES): "keep what the step uses beside its weights in the model, as a buffer or "
    "submodule: what the trainer or a callback holds is in no checkpoint",
    ("deepspeed", components.RATE): "give the scheduler to deepspeed.initialize(lr_scheduler=...), or to "
    "attach(engine, state={...})",
    ("deepspeed", components.LOSSES): "give what the step uses beside its weights to attach(engine, state={...})",
    ("megatron", components.LOSSES): "give what the step uses beside its weights to state= of the adapter",
}
"""What helps where the adapter of a framework is there, by framework and component."""
_TO_STATE = (
    "put what the step uses beside model and optimizer into state= (averages, teachers, modules, generators of its "
    "own): each with a state_dict() and a load_state_dict()"
)


def way_in(traces: Sequence[RehearsedRank]) -> tuple[str | None, bool]:
    """Return the framework that the job trains with, None for none, and whether its adapter is there."""
    for trace in traces:
        for name in _ADAPTERS:
            if name in trace.adapters:
                return name, True
    found = next((name for trace in traces for name in _ADAPTERS if name in trace.frameworks), None)
    return found, False


def _of_framework(traces: Sequence[RehearsedRank], otherwise: str) -> str:
    """Return the line of the adapter where a framework is used without it, what its page says where it is there."""
    framework, has_adapter = way_in(traces)
    if framework is None:
        return otherwise
    if not has_adapter:
        return _ADAPTERS[framework]
    return (
        f"the adapter saves, stops and resumes what the framework and its loop have: see docs/adapters/{framework}.md "
        "for what it cannot see (what code of your own keeps beside them) and how to give it that"
    )


def cure_of_loading(traces: Sequence[RehearsedRank]) -> str:
    """Return what helps where the newest save was not gone on from."""
    return _of_framework(traces, _LOAD_THE_NEWEST)


def cure_of_torn(traces: Sequence[RehearsedRank]) -> str:
    """Return what helps where a save that was cut short cannot be gone on from."""
    return _of_framework(traces, _WRITE_ASIDE)


def cure_of_place(traces: Sequence[RehearsedRank], resume: Resume) -> str:
    """Return what helps where the place in the epoch is lost."""
    return _of_framework(traces, _of_loop(components.SAMPLES, resume))


def cure_of_stop(traces: Sequence[RehearsedRank], *, has_stopped: bool = False) -> str:
    """Return what helps where a stop was not heeded; `has_stopped`: it was, and nothing was saved at it."""
    return _of_framework(traces, _SAVE_AT_THE_STOP if has_stopped else _STOP)


def cure_of(first: Difference | None, traces: Sequence[RehearsedRank], resume: Resume, *, is_of_all: bool) -> str:
    """Return what helps where `first` differs; None: only the ends do."""
    framework, has_adapter = way_in(traces)
    if first is None and framework is None:
        return ALL_OF_THE_STATE if is_of_all else STATE_OF_EACH
    if framework is not None and not has_adapter:
        return _ADAPTERS[framework]
    knows_order = has_adapter or any(trace.witnessed for trace in traces)
    if first is not None and first.component == components.SAMPLES and knows_order:
        cure = _SAME_ORDER  # the place in it is restored by the way in
    elif first is not None and (framework, first.component) in _GIVEN_TO_ADAPTER:
        cure = _GIVEN_TO_ADAPTER[str(framework), first.component]
    elif first is None or framework is not None:
        return _of_framework(traces, "")
    elif first.component == components.LOSSES and knows_order:
        cure = _TO_STATE
    else:
        cure = _of_loop(first.component, resume)
    return cure if is_of_all else f"{cure}, on every rank what is its own"


def _of_loop(component: str, resume: Resume) -> str:
    if component in _LOAD_IT:
        kind, saved, loaded = _LOAD_IT[component]
        if kind in resume.loaded:
            return loaded
        if kind in resume.saved:
            return saved
    return _OF_THE_LOOP[component]


def cure_of_record(traces: Sequence[RehearsedRank]) -> str:
    """Return what helps where the training is the same, and what it logs is not."""
    framework, has_adapter = way_in(traces)
    return _ADAPTERS[framework] if framework is not None and not has_adapter else _OF_RECORDS
