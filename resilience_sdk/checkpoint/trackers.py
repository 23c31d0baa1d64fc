"""Names of a run in experiment trackers, so that its curves go on after a resume instead of beginning anew.

Weights & Biases: the id of the active run travels with the checkpoint. A resume puts it where `wandb.init()` looks
for it (`WANDB_RUN_ID`, `WANDB_RESUME`), unless the program or its user has said something there. So `wandb.init()`
comes after the resume. TensorBoard has no ids: curves go on in the same directory, which `tensorboard_dir` names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from resilience_sdk.core.console import say_once
from resilience_sdk.core.environ import environment

_WANDB = "wandb"
_RUN_ID, _RESUME = "WANDB_RUN_ID", "WANDB_RESUME"


def tensorboard_dir(run_dir: str | os.PathLike[str]) -> str:
    """Return where TensorBoard's files of a run go: the same directory in every attempt and job.

    Example:
        writer = SummaryWriter(tensorboard_dir(run_dir), purge_step=checkpointer.resume())
    """
    return str(Path(run_dir) / "tensorboard")


def capture_trackers() -> dict[str, str]:
    """Return the ids of this process's active tracker runs, by tracker; never raises, imports nothing."""
    run = _wandb_run()
    identity = getattr(run, "id", None)
    return {_WANDB: identity} if isinstance(identity, str) and identity else {}


def restore_trackers(saved: object, env: MutableMapping[str, str] | None = None) -> None:
    """Let trackers that are started from now on go on with the saved runs; never raises.

    What is saved comes from a file, so only what looks like an id is taken.
    """
    env = environment() if env is None else env
    identity = saved.get(_WANDB) if isinstance(saved, Mapping) else None
    if not isinstance(identity, str) or not identity.replace("-", "").replace("_", "").isalnum():
        return
    run = _wandb_run()
    if run is not None and getattr(run, "id", None) != identity:
        say_once(
            "wandb",
            f"wandb.init() came before the resume and began another run; call it after start_run() or resume(), "
            f"then the curves of {identity} go on",
        )
    if run is None and _RUN_ID not in env:
        env[_RUN_ID] = identity
        env.setdefault(_RESUME, "allow")


def _wandb_run() -> object | None:
    return getattr(sys.modules.get(_WANDB), "run", None)
