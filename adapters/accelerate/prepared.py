"""What an accelerator has prepared: which model, optimizer and loader are the training, and what cannot be watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.errors import ConfigError

_SEAMS = ("_models", "_optimizers", "_dataloaders", "save_state", "load_state", "project_configuration", "state")
_UNSEEN = {
    "DEEPSPEED": "DeepSpeed steps inside its engine, where no hook reaches",
    "MEGATRON_LM": "Megatron-LM has its own loop: see resilience_sdk.adapters.megatron",
    "XLA": "steps on XLA are traced, not run",
}
_FSDP = "ACCELERATE_USE_FSDP"


@attrs.frozen
class Prepared:
    """The objects of one training, as the loop uses them; `optimizer` is torch's own, inside of Accelerate's."""

    model: Any
    optimizer: Any
    loader: Any


def find_prepared(
    accelerator: Any, model: Any = None, optimizer: Any = None, loader: Any = None, *, env: Mapping[str, str]
) -> Prepared:
    """Return what is trained: what is named, else what there is one of; raises ConfigError with the cure."""
    _check_accelerator(accelerator)
    _check_kind(accelerator, env)
    optimizers = list(accelerator._optimizers)
    if not optimizers or not accelerator._models:
        raise ConfigError(
            "attach(accelerator): it has prepared no model with an optimizer yet; call attach behind "
            "`model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`"
        )
    if optimizer is None and len(optimizers) > 1:
        raise ConfigError(
            f"attach(accelerator): it has prepared {len(optimizers)} optimizers; name the one whose steps are the "
            "progress: attach(accelerator, optimizer=...)"
        )
    chosen = optimizers[0] if optimizer is None else optimizer
    chosen = getattr(chosen, "optimizer", chosen)
    loaders = list(accelerator._dataloaders)
    if loader is not None and all(loader is not one for one in loaders):
        raise ConfigError(f"attach(loader={type(loader).__name__}): pass what accelerator.prepare(loader) has returned")
    return Prepared(
        model=_model_of(chosen, accelerator._models) if model is None else model,
        optimizer=chosen,
        loader=loader if loader is not None else next(iter(loaders), None),
    )


def kind_of(accelerator: Any) -> str:
    """Return the name of the accelerator's distributed type, such as `MULTI_GPU`."""
    kind = accelerator.distributed_type
    return str(getattr(kind, "value", kind))


def _check_accelerator(accelerator: Any) -> None:
    missing = [name for name in _SEAMS if not hasattr(accelerator, name)]
    if not missing:
        return
    is_one = any(base.__name__ == "Accelerator" for base in type(accelerator).__mro__)
    if not is_one:
        raise ConfigError(f"attach({type(accelerator).__name__}): expected the accelerate.Accelerator of the training")
    raise ConfigError(
        f"attach(accelerator): this version of accelerate has no Accelerator.{missing[0]}; "
        "pip install 'accelerate>=1.0', or use resilience_sdk.adapters.pytorch with the prepared objects"
    )


def _check_kind(accelerator: Any, env: Mapping[str, str]) -> None:
    kind = kind_of(accelerator)
    if kind in _UNSEEN:
        raise ConfigError(
            f"attach(accelerator): {kind} is not covered, since {_UNSEEN[kind]}; write `with heartbeat():` around each "
            "step instead"
        )
    if env.get(_FSDP, "").lower() in ("true", "1") and kind != "FSDP":
        raise ConfigError(
            f"attach(accelerator): FSDP is asked for ({_FSDP}, of the --config_file or the fsdp_plugin), but {kind} is "
            "in effect, so nothing is sharded: start several processes on devices that Accelerate shards on "
            "(resilience run --accelerate-config FILE, accelerate launch --config_file FILE), or take FSDP out of the "
            "configuration"
        )


def _model_of(optimizer: Any, models: Sequence[Any]) -> Any:
    """Return the model whose parameters an optimizer has; the first where that cannot be told."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = (model for model in models if any(id(parameter) in wanted for parameter in model.parameters()))
    return next(owners, models[0])
