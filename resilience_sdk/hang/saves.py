"""Saves that stall: a rank stands still while it writes or reads a checkpoint. Pure.

The table of patience is that of what it waits in, as for whoever stands still; only the name says more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from resilience_sdk.attribution.exceptions import is_our_frame, is_users_frame
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.evidence import busy_with
from resilience_sdk.hang.timers import RankState
from resilience_sdk.hang.waits import On

STALL = "checkpoint_stall"
# Functions as frameworks and scripts call them, whatever writes the bytes below them. A name is a promise and no proof:
# it says nothing of a function that does more (`save_model_and_train`), or of what such a function calls besides.
_SAVES = re.compile(
    r" _?(save|write|store|dump|export)_(\w+_)?(checkpoint|ckpt|snapshot|state|pretrained|model)s?(_\w+)?$"
)
_DOES_MORE = re.compile(r"_(and|then|or)_\w+$")
# What is called within a save, by the words of its name.
_WRITES = re.compile(
    r"(?<![a-z])(sav|writ|dump|stor|seriali|pickl|export|persist|flush|sync|clos|open|upload|cop[iy]|mov"
    r"|renam|replac|checkpoint|ckpt|snapshot|put|enter|exit|init)",
    re.IGNORECASE,
)
# Libraries write under these names. Of torch.save and its kin a stack shows the files, see `busy_with`.
_WRITERS = re.compile(
    r"/(numpy/lib/\w*npyio\w*|numpy/lib/format|json/__init__|pickle|joblib/\S+|h5py/\S+|zarr/\S+|pandas/io/\S+|pyarrow/\S+"
    r"|zipfile|zipfile/__init__|tarfile|shutil)\.py:\S+ _?(sav|dump|writ|cop|mov|to_|add|close)\w*$"
)
_TRAINS = ("/torch/nn/", "/torch/autograd/", "/torch/optim/", "/torch/utils/data/", "/torch/_tensor.py:")
_LOADS = re.compile(
    r"/(torch/serialization|torch/distributed/checkpoint/\w*load\w*|safetensors/\w+)\.py:\S+ \w*load\w*$"
)
_NO_STORAGE = (On.SLEEP, On.STOPPED_CHILD, On.TRACED_CHILD, On.COLLECTIVE)


def names_checkpoint(section: str | None) -> bool:
    """Tell whether a section is that of a checkpoint by its name; where activations are recomputed nothing is saved."""
    words = words_of(section or "")
    return bool(words & {"checkpoint", "checkpoints", "checkpointing", "ckpt", "ckpts"}) and not words & _RECOMPUTES


def is_saving(section: str | None, frames: Sequence[str]) -> bool:
    """Tell whether a section or a stack is that of a save: ours, a framework's, or one of the script's own."""
    return _is_written(section, frames) or is_named_save(frames)


def is_named_save(frames: Sequence[str]) -> bool:
    """Tell whether a function in a stack saves by its name, and nothing that it calls trains or does something else."""
    named = next((at for at, frame in enumerate(frames) if _SAVES.search(frame) and not _DOES_MORE.search(frame)), None)
    if named is None:
        return False
    return all(
        bool(_WRITES.search(frame.rpartition(" ")[2])) if is_users_frame(frame) else not trains((frame,))
        for frame in frames[:named]
    )


def trains(frames: Sequence[str]) -> bool:
    """Tell whether a stack is in what torch trains with: a model, its gradients, an optimizer, a loader of data."""
    return any(place in frame for frame in frames for place in _TRAINS)


def writes_a_file(frames: Sequence[str]) -> bool:
    """Tell whether a stack is in a function of a library that writes files."""
    return busy_with(frames) == "checkpoint" or any(_WRITERS.search(frame) for frame in frames)


def saving_frames(threads: Iterable[Sequence[str]]) -> Sequence[str]:
    """Return the stack of the first of these threads that saves; none where nobody does."""
    return next((frames for frames in threads if is_saving(None, frames) or writes_a_file(frames)), ())


def _is_written(section: str | None, frames: Sequence[str]) -> bool:
    """Tell it by more than the name of a function: a section that says so, or the library that writes."""
    is_ours = any(is_our_frame(frame) and "/checkpoint/" in frame for frame in frames)
    return names_checkpoint(section) or busy_with(frames) == "checkpoint" or is_ours


_RECOMPUTES = frozenset({"activation", "activations", "recompute", "forward", "backward", "gradient"})


def words_of(name: str) -> set[str]:
    """Return the words that a name is made of, in small letters."""
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def is_loading(frames: Sequence[str]) -> bool:
    """Tell whether a stack reads a checkpoint."""
    return any(_LOADS.search(frame) for frame in frames)


def stalls_in_save(state: RankState, frames: Sequence[str] = ()) -> bool:
    """Tell whether a rank stands still in a save, and not for its peers, for a time, or for somebody who stopped it."""
    activity = state.activity
    if activity is None or state.stopped or state.in_collective:
        return False
    if not _stands(activity, state.process_state) or activity.on in _NO_STORAGE:
        return False
    if state.slow_work == "checkpoint" or _is_written(state.section, frames):
        return True
    # A name needs the word of the kernel: only who stands before a file may be in what the name says.
    stands_at_file = activity.on in (On.FILE, On.FILE_LOCK) or state.process_state == "D"
    return stands_at_file and is_named_save(frames)


def _stands(activity: Activity, process_state: str) -> bool:
    if activity.kind is Kind.WAITING:
        return activity.on is On.FILE_LOCK
    return activity.kind is Kind.STUCK or (activity.kind is Kind.UNKNOWN and process_state == "D")
