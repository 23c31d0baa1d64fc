"""The cures of a resume that differs: what to change, by the component and the way in that the job has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rehearse import components
from resilience_sdk.rehearse.components import Difference

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


_OF_RECORDS = (
    "save and load what the value is added up in, such as a metric or the state_dict() of a callback, and "
    "let an evaluation that is due be made behind the resume"
)


def way_in(traces: Sequence[RehearsedRank]) -> tuple[str | None, bool]:
    """Return the framework that the job trains with, None for none, and whether its adapter is there."""
    for trace in traces:
        for name in _ADAPTERS:
            if name in trace.adapters:
                return name, True
    found = next((name for trace in traces for name in _ADAPTERS if name in trace.frameworks), None)
    return found, False


def cure_of(first: Difference | None, traces: Sequence[RehearsedRank], *, is_of_all: bool) -> str:
    """Return what helps where `first` differs; None: only the ends do."""
    framework, has_adapter = way_in(traces)
    if framework is not None and not has_adapter:
        return _ADAPTERS[framework]
    if first is None:
        return ALL_OF_THE_STATE if is_of_all else STATE_OF_EACH
    is_known = has_adapter or any(trace.witnessed for trace in traces)
    cure = _SAME_ORDER if first.component == components.SAMPLES and is_known else _OF_THE_LOOP[first.component]
    return cure if is_of_all else f"{cure}, on every rank what is its own"


def cure_of_record(traces: Sequence[RehearsedRank]) -> str:
    """Return what helps where the training is the same, and what it logs is not."""
    framework, has_adapter = way_in(traces)
    return _ADAPTERS[framework] if framework is not None and not has_adapter else _OF_RECORDS
