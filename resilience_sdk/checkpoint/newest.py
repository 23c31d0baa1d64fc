"""The newest good checkpoint: the choice of a resume, and the same without reading every byte, for the words of an end.

The rules of the latter are those of a resume: whole, trusted, without a NaN, not in quarantine, not of after a
rollback. Only the checksums are not computed, which may take minutes. What a resume has found to be damaged stands in
the journal, and is believed until somebody has changed the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint.history import CheckpointId, find_quarantined, find_rollbacks, skipped_steps
from resilience_sdk.checkpoint.manifest import (
    InvalidCheckpointError,
    Manifest,
    Selection,
    Skipped,
    find_size_fault,
    select_newest,
)
from resilience_sdk.checkpoint.store import CheckpointStore, read_manifest, sizes_of
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.run_directory import RunDirectory


@attrs.frozen
class NewestState:
    """`step`: how many steps the newest good checkpoint has completed; None = there is none.

    `not_taken`: newer ones, or all, which a resume does not take, each with the reason.
    """

    step: int | None
    not_taken: tuple[str, ...] = ()


# What the rules of a resume go by. All else is passed over without being parsed: a launcher looks at each restart.
_NEEDED = frozenset(
    {
        Event.FAULT_INJECTED,
        Event.RUN_START,
        Event.RANK_START,
        Event.RESUME,
        Event.CKPT_COMMIT,
        Event.CKPT_SKIP,
        Event.CKPT_QUARANTINE,
        Event.INCIDENT,
        Event.NUMERICS,
    }
)
_OTHERS = frozenset(Event) - _NEEDED


class NewestFinder:
    """Finds the newest good state of a run, again and again; what of the journal was read is not read again."""

    def __init__(self, run_dir: RunDirectory) -> None:
        """Read nothing yet."""
        self._run_dir = run_dir
        self._read_to: Mapping[str, int] = {}
        self._events: list[Mapping[str, Any]] = []

    def find(self) -> NewestState:
        """Return it as it is now. Never raises."""
        directory = self._run_dir.checkpoints
        try:
            names = os.listdir(directory)
        except OSError:
            return NewestState(None)
        new = read_journal(self._run_dir.journal, self._read_to, without=_OTHERS, only_ended=True)
        self._read_to = {**self._read_to, **new.read_to}
        self._events = sorted([*self._events, *new.events], key=lambda event: float(event["t"]))
        found = _select(directory, names, tuple(self._events))
        not_taken = tuple(f"{one.name}: {one.why}" for one in found.skipped)
        return NewestState(None if found.manifest is None else found.manifest.step, not_taken)


def newest_checkpoint(run_dir: RunDirectory) -> int | None:
    """Return after how many steps the newest good checkpoint was saved, or None."""
    return NewestFinder(run_dir).find().step


def _select(directory: Path, names: Iterable[str], events: tuple[Mapping[str, Any], ...]) -> Selection:
    rollbacks, quarantined, damaged = find_rollbacks(events), find_quarantined(events), _found_damaged(events)

    def examine(name: str) -> Manifest:
        manifest = read_manifest(directory / name)
        if (fault := find_size_fault(manifest, sizes_of(directory / name, manifest))) is not None:
            raise InvalidCheckpointError(fault)
        for back in rollbacks:
            if why := back.why_bad(manifest.step, manifest.created_at):
                raise InvalidCheckpointError(why, rolled_back=True)
        at, why = damaged.get(name, (0.0, ""))
        if at > max(manifest.created_at, _changed_at(directory / name, manifest)):
            raise InvalidCheckpointError(why)
        return manifest

    def distrust(name: str, manifest: Manifest) -> str | None:
        return manifest.why_bad or quarantined.get(CheckpointId(name, manifest.created_at))

    return select_newest(names, examine, distrust)


def _found_damaged(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """Return when a resume passed over which checkpoint, and why, where nothing was resumed from it since."""
    found: dict[str, tuple[float, str]] = {}
    for event in events:
        name = event.get("checkpoint")
        if not isinstance(name, str):
            continue
        if event["event"] == Event.CKPT_SKIP.value:
            found[name] = (float(event["t"]), str(event.get("why")))
        elif event["event"] in (Event.RESUME.value, Event.CKPT_COMMIT.value):
            found.pop(name, None)
    return found


def _changed_at(directory: Path, manifest: Manifest) -> float:
    """Return when a file of a checkpoint was last changed: a copy may have been put back (Unix seconds)."""
    changed = [0.0]
    for entry in manifest.files:
        with contextlib.suppress(OSError):
            changed.append((directory / entry.name).stat(follow_symlinks=False).st_ctime)
    return max(changed)


_SEVERAL = 2  # committed checkpoints


def choose(store: CheckpointStore, events: Iterable[Mapping[str, Any]], emit: Callable[..., None]) -> dict[str, Any]:
    """Return what all ranks load as a JSON value; an error that all must raise is in it. On rank 0.

    `events` are those of the journal so far; `emit(event, step, **fields)` adds to it.
    """
    events = tuple(events)

    def tell(selection: Selection) -> None:
        _tell(selection, find_quarantined(events), events, emit)
        if selection.name is None and selection.skipped and _refusal(selection.skipped, str(store.directory)) is None:
            say("training starts over: there is no other checkpoint")

    return look(store, events, tell, may_clean=True)


def look(
    store: CheckpointStore,
    events: Iterable[Mapping[str, Any]],
    tell: Callable[[Selection], None] = lambda _selection: None,
    *,
    may_clean: bool = False,
) -> dict[str, Any]:
    """Return the same without a word, and without changing anything there. Any rank."""
    events = tuple(events)
    rollbacks = find_rollbacks(events)
    answer: dict[str, Any] = {"error": None, "name": None, "step": 0, "skip": skipped_steps(rollbacks)}
    try:
        selection = store.find_newest(find_quarantined(events), rollbacks, may_clean=may_clean)
    except OSError as error:
        reason = f"cannot read {store.directory}: {error.strerror}"
        return {**answer, "error": f"{reason}; so it cannot be told where to go on"}
    tell(selection)
    manifest = selection.manifest
    if manifest is None:
        return {**answer, "error": _refusal(selection.skipped, str(store.directory))}
    return {
        **answer,
        "name": selection.name,
        "step": manifest.step,
        "created_at": manifest.created_at,
        "bytes": manifest.size,
        "world_size": manifest.world_size,
        "files": sorted(manifest.names()),
        "digests": dict(manifest.digests),
    }


def _tell(
    selection: Selection,
    quarantined: Mapping[CheckpointId, str],
    events: Iterable[Mapping[str, Any]],
    emit: Callable[..., None],
) -> None:
    """Say and journal why newer checkpoints are not taken."""
    known = {
        (event.get("checkpoint"), event.get("created_at"))
        for event in events
        if event.get("event") == Event.CKPT_QUARANTINE.value
    }
    for skipped in selection.skipped:
        if skipped.quarantined:
            say(f"checkpoint {skipped.name} is in quarantine: {skipped.why}; an older one is resumed")
            if (skipped.name, skipped.created_at) not in known:
                facts = {"checkpoint": skipped.name, "created_at": skipped.created_at, "why": skipped.why}
                emit(Event.CKPT_QUARANTINE, skipped.step, **facts)
        else:
            say(f"skipped checkpoint {skipped.name}: {skipped.why}")
            emit(Event.CKPT_SKIP, skipped.step, checkpoint=skipped.name, why=skipped.why)
    if selection.name is not None and selection.manifest is not None:
        identity = CheckpointId(selection.name, selection.manifest.created_at)
        why = selection.manifest.why_bad or quarantined.get(identity)
        if why is not None:
            say(f"checkpoint {selection.name} is resumed again, though {why}: there is no older one")


def _refusal(skipped: tuple[Skipped, ...], directory: str) -> str | None:
    """Return why a start from nothing would be wrong: there is a whole checkpoint, or there were several.

    Of one alone that is damaged nothing more is lost than the time before it; where all of several are, something is
    wrong with the storage, and a person may have a copy.
    """
    untrusted = [item.why for item in skipped if item.untrusted]
    if untrusted:
        return f"the checkpoints there are refused, and nothing else can be resumed: {untrusted[0]}"
    damaged = [item for item in skipped if item.damaged]
    if len(damaged) < _SEVERAL:
        return None
    newest = f"{damaged[0].name}: {damaged[0].why}"
    return (
        f"all {len(damaged)} checkpoints in {directory} are damaged ({newest}), and to start from nothing would lose "
        "the run: put back a copy of one, or start over in another run directory (`resilience run --fresh` does)"
    )
