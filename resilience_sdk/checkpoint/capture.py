"""One rank's part: its state is copied to the host and written in a save, and read back into live objects in a resume.

The name of the run in experiment trackers travels with it, so that its curves go on after a resume instead of beginning
anew. Weights & Biases: a resume puts the id where `wandb.init()` looks for it (`WANDB_RUN_ID`, `WANDB_RESUME`), unless
the program or its user has said something there; so `wandb.init()` comes after the resume. TensorBoard has no ids:
curves go on in the same directory, which `tensorboard_dir` names.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import attrs
import torch

from resilience_sdk._version import __version__
from resilience_sdk.checkpoint import by_rank, containers, digests, payload, sharded
from resilience_sdk.checkpoint.failure import number_of_write
from resilience_sdk.checkpoint.manifest import MANIFEST_NAME, SHARDED, FileEntry, Manifest, is_listable
from resilience_sdk.checkpoint.other_optimizers import say_others
from resilience_sdk.checkpoint.ranks import Ranks, describe
from resilience_sdk.checkpoint.state import (
    StateMap,
    apply,
    capture,
    capture_rng,
    find_nan,
    fitting,
    has_state,
    restore_rng,
    unwrap,
)
from resilience_sdk.checkpoint.store import CheckpointStore
from resilience_sdk.checkpoint.window import note_open_window
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.environ import environment
from resilience_sdk.core.resume_limits import note
from resilience_sdk.errors import CheckpointError

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


class Staging:
    """Keeps its buffers from one save to the next: pages that are new cost several times the copy itself.

    So it holds as much memory as the state from the first save on, and a copy is valid until the next one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, value: Any) -> Any:
        """Return a copy of a captured state that shares nothing with it; tensors are on the CPU."""
        used: dict[str, torch.Tensor] = {}
        copied = self._copy(value, "", used, {})
        self._buffers = used
        return copied

    def copy_all(self, value: Any) -> Any:
        """Return a copy of what a framework gives, in which all else is copied too: it may hold objects of its own."""
        tensors: dict[int, torch.Tensor] = {}
        _collect(value, tensors)
        # By their order: a buffer is used again for the tensor at the same place of the next save.
        copies = self.copy(list(tensors.values()))
        return copy.deepcopy(value, dict(zip(tensors, copies, strict=True)))

    def _copy(self, value: Any, place: str, used: dict[str, torch.Tensor], seen: dict[Any, Any]) -> Any:
        if isinstance(value, torch.Tensor):
            key = _identity(value)
            if key not in seen:  # tied weights stay tied
                seen[key] = used[place] = self._copy_tensor(value.detach(), place)
            return seen[key]
        if isinstance(value, Mapping):
            made: Any = type(value)()
            for number, (key, item) in enumerate(value.items()):
                made[key] = self._copy(item, f"{place}/{number}", used, seen)
            if hasattr(value, "__dict__"):
                vars(made).update(vars(value))  # the `_metadata` of a module's state
            return made
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self._copy(item, f"{place}/{number}", used, seen) for number, item in enumerate(value))
        return bytearray(value) if isinstance(value, bytearray) else value

    def _copy_tensor(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return tensor.to("cpu", copy=True)
        return buffer.copy_(tensor)


def _collect(value: Any, found: dict[int, torch.Tensor]) -> None:
    """Add the tensors in nested mappings, lists and tuples, by their ids."""
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _collect(item, found)


def _identity(tensor: torch.Tensor) -> Any:
    """Return what two tensors share that are the same memory seen alike: `state_dict()` makes an object per name."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return id(tensor)
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


@attrs.frozen
class RankPart:
    """What one rank writes. `spread` is this rank's part of what is sharded; `shared` is empty but on rank 0."""

    document: Mapping[str, Any]
    own: Mapping[str, Any]
    shared: Mapping[str, Any]
    spread: Mapping[str, Any]
    values: str
    writer: Callable[[Path], object] | None = None
    """Writes more files, on all ranks at once: a framework that saves by itself."""
    nan: str | None = None
    """A tensor in `spread` that holds a NaN: it is looked at before the training goes on, which changes it."""
    spread_digests: Mapping[str, str] | None = None
    """Those of `spread`, taken then too; None where no digests are wanted."""


def capture_part(
    state: StateMap,
    position: Any,
    rank: int,
    values: str,
    writer: Callable[[Path], object] | None = None,
    *,
    is_checked: bool = True,
) -> RankPart:
    """Take this rank's part of the live objects by reference, and its data position.

    Collective for some kinds of sharding. Whatever a `state_dict()` raises passes through.
    """
    document = {
        "rng": capture_rng(),
        "position": position,
        "trackers": capture_trackers(),
    }
    passes = {name: one for name, watch in state.passes.items() if (one := watch.capture()) is not None}
    if passes:
        document["passes"] = passes
    if state.workers:
        document["drawn_in_workers"] = {name: workers.capture() for name, workers in state.workers.items()}
    if held := state.held.capture():
        document["held"] = held
    if beside := state.beside.capture():
        document["beside"] = beside
    spread = sharded.capture(state.sharded, state.modules)
    shared = state.capture_shared() if rank == 0 else {}
    taken = digests.digests_of(digests.entries_of_state(spread)) if is_checked else None
    return RankPart(document, state.capture_rank(), shared, spread, values, writer, find_nan(spread), taken)


def with_values(part: RankPart, values: Mapping[str, Any]) -> RankPart:
    """Return it with the plain values of this rank, where they are others than those of rank 0."""
    try:
        own = payload.encode_values(values)
    except CheckpointError as error:
        # Those of rank 0 alone had to be plain until now.
        say_once("values of a rank", f"{error}; it is saved as rank 0 has it")
        return part
    return part if own == part.values else attrs.evolve(part, document={**part.document, "values": json.loads(own)})


def with_own(state: StateMap, part: RankPart, own: Mapping[str, Any], first: Mapping[str, Any]) -> RankPart:
    """Return it with what this rank has otherwise than rank 0, by the digests of both."""
    if own == first:
        return part
    kept = by_rank.differing(state, own, first)
    taken = part.spread_digests
    if taken is not None:  # its resume compares what it has, not what rank 0 has
        found = digests.digests_of(digests.entries_of_state(_shared_here(state) or {}))
        own_names = [f"the state of {name}" for name in kept]
        taken = {**taken, **{name: found.get(name, digests.UNKNOWN) for name in own_names}}
    return attrs.evolve(part, own={**part.own, by_rank.KEY: kept}, spread_digests=taken)


def _shared_here(state: StateMap) -> dict[str, Any] | None:
    """Return what rank 0 writes for all as it is on another rank; None where a part gives no state here."""
    try:
        return state.capture_shared()
    except Exception:  # noqa: BLE001 - whatever a state_dict() raises: rank 0 alone has to give one
        return None


def with_digests(part: RankPart, objects: Callable[[], Mapping[str, Any]]) -> RankPart:
    """Return a part with the digests of live objects, which a framework saves by itself. Never raises."""
    try:
        found = digests.digests_of(digests.entries_of_objects(objects()))
    except Exception as error:  # noqa: BLE001 - a save is not lost over it
        say_once("digests", f"the framework's state is not compared at a resume: {describe(error)}")
        return part
    return attrs.evolve(part, spread_digests={**(part.spread_digests or {}), **found})


def copy_part(part: RankPart, staging: Staging) -> RankPart:
    """Return a copy that the training cannot change; what is spread is copied by torch.distributed.checkpoint."""
    copied = staging.copy({"own": part.own, "shared": part.shared})
    return attrs.evolve(part, own=copied["own"], shared=copied["shared"])


def write_part(part: RankPart, directory: Path, ranks: Ranks, *, mode: int, spread: Any = None) -> dict[str, Any]:
    """Write one rank's files and return what rank 0 must know; an error is part of the answer. Never raises.

    Collective where there is something spread, unless `spread` is the future of its writing.
    """
    rank = ranks.rank
    try:
        # First what is collective: a rank that failed before it would leave the others waiting in it.
        if spread is not None:
            spread.result()
        elif part.spread:
            sharded.save(directory, part.spread, ranks)
        places, names = {SHARDED} if part.spread else set(), frozenset[str]()
        if part.writer is not None:
            # Each rank reads its own back: one alone would read the whole model.
            written = part.writer(directory)
            names = written if isinstance(written, frozenset) else names
            places |= sharded.places_in(directory)
        entries = [one for place in sorted(places) for one in sharded.entries_of(directory, place, rank, mode=mode)]
        entries += [sharded.entry_of(directory, name, mode=mode) for name in sorted(names) if is_listable(name)]
        entries += payload.write_rank(directory, rank, part.document, part.own, mode=mode)
        if rank == 0:
            entries += payload.write_shared(directory, part.shared, part.values, sorted(part.spread), mode=mode)
    except BaseException as error:
        # A save that fails must not end the training. What DCP raises is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            raise
        reason = _with_space(describe(error), directory)
        return {"error": reason, "number": number_of_write(error, directory)}
    nan = part.nan or find_nan({**part.shared, **part.own})
    return {"error": None, "files": [entry.to_json() for entry in entries], "nan": nan, "digests": _digests(part)}


def _digests(part: RankPart) -> dict[str, Any] | None:
    if part.spread_digests is None:
        return None
    shared, own = digests.of_rank(part.document, part.own, part.shared, part.values)
    return {"shared": shared, "own": {**part.spread_digests, **own}}


def seal(store: CheckpointStore, parts: list[Any], unfinished: Path, step: int, token: str, now: float) -> Manifest:
    """Commit on rank 0 what all ranks have written; raises `OSError`, and nothing is visible then."""
    files = tuple(FileEntry.from_json(entry) for part in parts for entry in part["files"])
    files += foreign_entries(unfinished, {entry.name for entry in files}, store)
    nan = next((f"{part['nan']} of rank {rank}" for rank, part in enumerate(parts) if part["nan"]), None)
    taken = [part.get("digests") for part in parts]
    proof = {"shared": taken[0]["shared"], "ranks": [one["own"] for one in taken]} if all(taken) else {}
    manifest = Manifest(step, len(parts), files, now, {"resilience_sdk": __version__}, nan, proof)
    store.commit(unfinished, manifest, token)
    return manifest


def _note_by_rank(state: StateMap, saved_ranks: int, ranks: int) -> None:
    held = [name for name, item in state.per_rank.items() if containers.is_container(item)]
    if held:
        note(
            "state by rank",
            ", ".join(f"state[{name!r}]" for name in held),
            f"each of {saved_ranks} ranks had its own, and {ranks} resume, so it begins as the program has made it",
            f"resume with {saved_ranks} ranks",
        )


def foreign_entries(directory: Path, known: set[str], store: CheckpointStore) -> tuple[FileEntry, ...]:
    """Return the entries of what somebody else has written here, made safe to keep; raises `OSError`.

    A framework writes by its own rules: with the modes of the user's umask, without a sync, and under names that a
    manifest must not list, or no reader would take it. These stay where they are.
    """
    folders = sorted(path for path in directory.iterdir() if path.is_dir())
    found = []
    for place in (directory, *folders):
        for path in sorted(place.iterdir()):
            relative = path.relative_to(directory).as_posix()
            if relative in known or relative == MANIFEST_NAME or path.is_dir():
                continue
            entry = sharded.entry_of(directory, relative, mode=store.file_mode)
            if is_listable(relative):
                found.append(entry)
            else:
                say_once(
                    f"unlisted:{relative}",
                    f"{relative!r} is saved, but not checked at a resume: a manifest cannot list its name",
                )
    for folder in folders:
        os.chmod(folder, store.directory_mode)
    return tuple(found)


def first_error(parts: list[dict[str, Any]], step: int | None = None) -> str | None:
    """Return why these parts are no checkpoint (of `step`), naming the rank, or None."""
    for rank, part in enumerate(parts):
        if part["error"]:
            # What DCP has told all ranks of names the rank already.
            is_named = len(parts) == 1 or part["error"].startswith("rank ")
            return str(part["error"]) if is_named else f"rank {rank}: {part['error']}"
        if step is not None and part["step"] != step:
            return f"rank {rank} saves step {part['step']}, rank 0 step {step}: all ranks must save at one step"
    return None


def _with_space(reason: str, directory: Path) -> str:
    """Return `reason`, and that the disk is full where torch's own writers have swallowed that."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return reason
    is_full = status.f_blocks > 0 and (status.f_bavail == 0 or status.f_files > 0 == status.f_favail)
    return f"{reason}; the file system is full" if is_full and "No space left" not in reason else reason


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
    passes: Mapping[str, Any] = attrs.field(factory=dict)
    """How the passes over loaders were, which are known or not."""
    held: Mapping[str, Any] = attrs.field(factory=dict)
    """The generators of objects, as they were at the save."""
    loaded: frozenset[str] = frozenset()
    """The entries of this rank's own that were restored."""
    beside: Mapping[str, Any] = attrs.field(factory=dict)
    """What modules held beside their states that the training had changed."""
    drawn: Mapping[str, Any] = attrs.field(factory=dict)
    """Whether workers had drawn random numbers, by the names of their loaders; None or missing: nobody knows."""


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

    def digests(self, position: Any, values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        """Return those of the live objects, shared and of this rank, now that they are restored."""
        state = self._state
        document = {"rng": capture_rng(), "position": position, "held": state.held.capture()}
        # Not asked: what has a state_dict() and is per rank, a loader, which may start to read for an answer.
        own = {name: capture(name, item) for name, item in state.per_rank.items() if not has_state(item)}
        is_first = self._ranks.rank == 0
        shared = state.capture_shared() if is_first else _shared_here(state) or {}
        text = payload.encode_values(values) if is_first else None  # those of another rank may be its own
        found, mine = digests.of_rank(document, own, shared, text)
        return found, {**digests.digests_of(digests.entries_of_state(self._templates)), **mine}

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
            _note_by_rank(state, saved_ranks, ranks)
            document = payload.read_json(directory / payload.rank_document(0))
            if rank == 0:
                restore_trackers(document.get("trackers"))
            return Restored(values, document.get("position"), None, {}, beside=document.get("beside", {}))
        document = payload.read_json(directory / payload.rank_document(rank))
        pending: dict[str, Any] = {}
        if payload.rank_tensors(rank) in files:
            pending = dict(payload.read_tensors(directory / payload.rank_tensors(rank)))
        loaded = frozenset(name for name in state.per_rank if name in pending)
        for name, item in state.per_rank.items():
            if name in loaded:
                apply(name, item, pending.pop(name))
            else:
                note(
                    f"state:{name}",
                    f"state[{name!r}]",
                    "the checkpoint has none of that name, so it begins as the program has made it",
                    "nothing is to be done from the next checkpoint on",
                )
        by_rank.restore(state, pending.pop(by_rank.KEY, {}))
        values |= document.get("values", {})  # names that rank 0 alone has given are for all
        if document.get("open_window"):
            note_open_window()
        others = document.get("other_optimizers")
        say_others([str(name) for name in others] if isinstance(others, list) else [])
        restore_rng(document["rng"])
        restore_trackers(document.get("trackers"))
        return Restored(
            values,
            document.get("position"),
            document["rng"],
            pending,
            document.get("passes", {}),
            document.get("held", {}),
            loaded,
            document.get("beside", {}),
            document.get("drawn_in_workers", {}),
        )
