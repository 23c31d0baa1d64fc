"""The metrics of a fit that is under way, which Lightning's checkpoints leave out.

That is: the sums of `self.log(..., on_epoch=True)` in an open epoch, the states of the `torchmetrics` of the module,
and the newest values, by which a scheduler or a callback judges. Each rank saves its own.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from resilience_sdk.adapters._base import Patches
from resilience_sdk.core.resume_limits import note

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_MORE_META = ("dataloader_idx", "metric_attribute")
_STATES = ("value", "cumulated_batch_size", "_forward_cache", "_computed")
_NEWEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def say_unknown(error: Exception) -> None:
    """Say once that metrics of an open epoch are not saved: this version of Lightning keeps them elsewhere."""
    note(
        "metrics",
        "metrics of the epoch that is open",
        f"they are of its steps since the resume alone ({type(error).__name__}: {error})",
        "log them by step, or use a version of Lightning that this adapter knows",
    )


def capture(trainer: Any) -> dict[str, Any]:
    """Return them as of now; empty, and said, where they are not found or could not be loaded again."""
    from resilience_sdk.checkpoint.state import capture as checked

    try:
        saved: dict[str, Any] = checked("metrics", _Saved(_capture(trainer)))
    except Exception as error:  # noqa: BLE001 - private names, and metrics of the user's own
        say_unknown(error)
        return {}
    return saved


@attrs.frozen
class _Saved:
    """What is to be checked as an entry of a checkpoint is."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return self.state


def restore(trainer: Any, saved: Mapping[str, Any], patches: Patches) -> None:
    """Put back what `capture` returned; what is put on Lightning for that is of `patches`."""
    if not saved:
        return
    try:
        _restore(trainer, saved, patches)
    except Exception as error:  # noqa: BLE001 - as above
        say_unknown(error)


def _capture(trainer: Any) -> dict[str, Any]:
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    saved: dict[str, Any] = {
        "first_loop_iter": connector._first_loop_iter,
        "current_fx": connector._current_fx,
        "results": [_result(key, each) for key, each in results.items() if not each.has_reset],
        "modules": {name: _metric(each) for name, each in _metrics_of(trainer.lightning_module)},
    }
    for name in _NEWEST:
        saved[name] = dict(getattr(connector, name))
    return saved


def _metrics_of(module: Any) -> Iterator[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        for each in module.modules():
            if isinstance(each, torchmetrics.MetricCollection):
                each.values()  # brings those that share a state with another one up to date
        yield from ((name, each) for name, each in module.named_modules() if isinstance(each, torchmetrics.Metric))


def _metric(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    copied = {name: list(state) if isinstance(state, list) else state for name, state in states.items()}
    return {"count": metric._update_count, "states": copied}


def _result(key: str, result: Any) -> dict[str, Any]:
    meta = result.meta
    sync = meta.sync
    saved = {name: getattr(meta, name) for name in (*_META, *_MORE_META)}
    saved |= {"key": key, "is_tensor": result.is_tensor, "reduce": meta.reduce_fx.__name__}
    saved["is_builtin"] = meta.reduce_fx.__module__ == "builtins"
    saved |= {"should": sync._should, "op": sync._op, "rank_zero_only": sync.rank_zero_only}
    saved |= {"has_group": sync._group is not None, "count": result._update_count}
    names = _STATES if result.is_tensor else _STATES[2:]
    return saved | {name: _detached(getattr(result, name)) for name in names if hasattr(result, name)}


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _restore(trainer: Any, saved: Mapping[str, Any], patches: Patches) -> None:
    connector = trainer._logger_connector
    device = trainer.strategy.root_device
    modules = dict(trainer.lightning_module.named_modules())
    for name, state in saved["modules"].items():
        try:
            _restore_metric(name, modules.get(name), state)
        except Exception as error:  # noqa: BLE001 - of somebody else's kind; the others count all the same
            say_unknown(error)
    results = trainer.fit_loop.epoch_loop._results
    restored = {}
    for each in saved["results"]:
        made = _made_result(each, type(results), modules, trainer.strategy.reduce)
        if made is not None:
            restored[each["key"]] = results[each["key"]] = made.to(device)
    if restored:
        patches.replace(results, "log", _forgiving(results, restored))
    for name in _NEWEST:
        getattr(connector, name).update(_moved(saved[name], device))
    connector._first_loop_iter, connector._current_fx = saved["first_loop_iter"], saved["current_fx"]


def _moved(values: Mapping[str, Any], device: Any) -> dict[str, Any]:
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in values.items()}


def _forgiving(results: Any, restored: dict[str, Any]) -> Callable[..., None]:
    """Return `results.log` that drops what was restored where the program logs it in another way now."""
    plain = results.log

    def log(fx: str, name: str, *args: Any, **options: Any) -> None:
        try:
            plain(fx, name, *args, **options)
        except Exception as error:
            begin = f"{fx}.{name}"
            changed = [key for key in restored if key == begin or key.startswith(f"{begin}.")]
            if type(error).__name__ != "MisconfigurationException" or not changed:
                raise
            for key in changed:
                del restored[key]
                results.pop(key, None)
            say_unknown(ValueError(f"{name} is logged in another way than when it was saved"))
            plain(fx, name, *args, **options)

    return log


def _restore_metric(name: str, metric: Any, saved: Mapping[str, Any]) -> None:
    states, here = saved["states"], getattr(metric, "_defaults", {})
    if {each: _shape(value) for each, value in states.items()} != {each: _shape(here[each]) for each in here}:
        raise ValueError(f"{name} has other states now")
    for each, value in states.items():
        is_list = isinstance(value, list)
        setattr(metric, each, [one.to(metric.device) for one in value] if is_list else value.to(metric.device))
    metric._update_count, metric._computed = saved["count"], None


def _shape(state: Any) -> Any:
    return list if isinstance(state, list) else state.shape


def _made_result(saved: Mapping[str, Any], kind: type, modules: Mapping[str, Any], reduce: Callable[..., Any]) -> Any:
    """Return a result as Lightning makes it at the first `log`; None where it is of something that is not there."""
    import torch

    private = sys.modules[kind.__module__]
    if saved["has_group"]:
        raise TypeError(f"{saved['name']} is logged with a sync_dist_group")
    if not saved["is_tensor"] and saved["metric_attribute"] not in modules:
        return None
    meta = private._Metadata(
        **{name: saved[name] for name in (*_META, *_MORE_META)},
        reduce_fx=getattr(builtins if saved["is_builtin"] else torch, saved["reduce"]),
    )
    meta.sync = private._Sync(
        _should=saved["should"], fn=reduce, _op=saved["op"], rank_zero_only=saved["rank_zero_only"]
    )
    made = private._ResultMetric(meta, saved["is_tensor"])
    for name in _STATES:
        if name in saved:
            setattr(made, name, saved[name])
    if not saved["is_tensor"]:
        made.value = modules[saved["metric_attribute"]]
    made._update_count = saved["count"]
    return made
