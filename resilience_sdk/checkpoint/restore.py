"""The resume: rank 0 chooses a checkpoint for all, and every rank reads it back into live objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint import payload, sharded
from resilience_sdk.checkpoint.ranks import Ranks, describe
from resilience_sdk.checkpoint.state import StateMap, apply, fitting, restore_rng, unwrap
from resilience_sdk.checkpoint.trackers import restore_trackers
from resilience_sdk.core.console import say


@attrs.frozen
class Restored:
    """What a checkpoint brought besides the state: for the caller to hand on.

    `position` is the data position (a JSON value), `rng` the random number generators of this rank, `pending`
    the states of data loaders that are not known yet. The last two are empty if the number of ranks changed.
    """

    values: dict[str, Any]
    position: Any
    rng: Mapping[str, Any] | None
    pending: dict[str, Any]


class CheckpointReading:
    """A checkpoint that was verified, on its way into live objects. `prepare`, then `restore`, on all ranks."""

    def __init__(self, directory: Path, files: list[str], state: StateMap, ranks: Ranks) -> None:
        self._directory = directory
        self._files = files
        self._state = state
        self._ranks = ranks
        self._spread: list[str] = []  # the entries of which the checkpoint has a part of each rank
        self._templates: dict[str, Any] = {}  # objects that tell this rank's part of each of their tensors

    def prepare(self) -> None:
        """Find out what is read in parts; raises as `restore`."""
        if payload.SPREAD in self._files:
            self._spread = list(payload.read_json(self._directory / payload.SPREAD)["entries"])
            self._templates = sharded.capture(self._wanted(), self._state.modules)

    def _wanted(self) -> dict[str, Any]:
        shared = self._state.shared
        return {name: unwrap(shared[name]) for name in self._spread if name in shared}

    def restore(self, saved_ranks: int) -> Restored:
        """Load everything into the state and the generators; return the rest. Collective if there are parts.

        Raises `CheckpointError` when it does not fit, `InvalidCheckpointError` or `OSError` when a file cannot
        be read.
        """
        if self._templates:
            self._restore_spread()
        return self._restore_whole(saved_ranks)

    def _restore_spread(self) -> None:
        with fitting(", ".join(self._templates)):
            try:
                sharded.load(self._directory, self._templates, self._ranks)
            except BaseException as error:
                if type(error).__name__ != "CheckpointException":  # torch's own, no Exception
                    raise
                raise ValueError(describe(error)) from None
            sharded.apply(self._wanted(), self._state.modules, self._templates)

    def _restore_whole(self, saved_ranks: int) -> Restored:
        directory, files, state = self._directory, self._files, self._state
        rank, ranks = self._ranks.rank, self._ranks.size
        unused = state.apply_shared(payload.read_tensors(directory / payload.SHARED), self._spread)
        if unused and rank == 0:
            say(f"the checkpoint also has {', '.join(unused)}, which state does not ask for: left out")
        values = payload.read_json(directory / payload.VALUES)
        if saved_ranks != ranks:
            if rank == 0:
                say(
                    f"saved by {saved_ranks} ranks, resumed by {ranks}: random number generators and data "
                    f"loaders with state start anew"
                )
            document = payload.read_json(directory / payload.rank_document(0))
            if rank == 0:
                restore_trackers(document.get("trackers"))
            return Restored(values, document.get("position"), None, {})
        document = payload.read_json(directory / payload.rank_document(rank))
        pending: dict[str, Any] = {}
        if payload.rank_tensors(rank) in files:
            pending = dict(payload.read_tensors(directory / payload.rank_tensors(rank)))
        for name, item in state.per_rank.items():
            if name in pending:
                apply(name, item, pending.pop(name))
        restore_rng(document["rng"])
        restore_trackers(document.get("trackers"))
        return Restored(values, document.get("position"), document["rng"], pending)
