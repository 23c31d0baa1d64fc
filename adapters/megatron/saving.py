"""Checkpoints of ours around `megatron.core.dist_checkpointing`: manifest last, and a resume that checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.adapters._base import framework
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import SHARDED
from resilience_sdk.checkpoint.ranks import find_ranks, raise_together

State = Callable[[bool], Mapping[str, Any]]


def checkpointer(
    sharded_state: State, load: Callable[[Mapping[str, Any]], None], **options: Any
) -> MegatronCheckpointer:
    """Return what saves and resumes a loop on `megatron.core`, for one that has no checkpoints of its own.

    Args:
        sharded_state: Returns the sharded state dict of this rank; `sharded_state(True)` that to load into.
        load: Takes the loaded one, of the same shape.
        **options: Those of `Checkpointer`: `run_dir`, `every`, `keep`.

    Raises:
        ConfigError: An option cannot be used.
        RunDirectoryError: The run directory cannot be used, or none is named.

    Example:
        def sharded_state(is_loading):
            state = model.sharded_state_dict()
            return {"model": state, "optimizer": optimizer.sharded_state_dict(state, is_loading=is_loading)}

        saver = megatron.checkpointer(sharded_state, load, every=500)
        iteration = saver.resume()
    """
    return MegatronCheckpointer(sharded_state, load, **options)


class MegatronCheckpointer(Checkpointer):
    """A `Checkpointer` whose payload `dist_checkpointing` writes and reads."""

    def __init__(self, sharded_state: State, load: Callable[[Mapping[str, Any]], None], **options: Any) -> None:
        """Prepare the run directory; use `checkpointer`."""
        super().__init__({}, writer=self._write, **options)
        self._sharded_state = sharded_state
        self._load_into = load

    def resume(self) -> int:
        """Load the newest valid checkpoint; return the next step to run, 0 = fresh. Collective.

        Raises:
            CheckpointError: None may be trusted, see `Checkpointer.resume`; what `dist_checkpointing` raises passes.
        """
        step = super().resume()
        good = self.last_good
        if step and good is not None:
            self._load_into(_framework().load(self._sharded_state(True), str(good.path / SHARDED)))
            self.restore_rng()
        return step

    def _write(self, directory: Path) -> None:
        target = directory / SHARDED
        # Megatron asks for it on every rank. Together, since one that could not make it would be missed in the save.
        raise_together(find_ranks(), lambda: target.mkdir(exist_ok=True))
        _framework().save(self._sharded_state(False), str(target))


def _framework() -> Any:
    return framework("megatron.core.dist_checkpointing", "megatron-core")
