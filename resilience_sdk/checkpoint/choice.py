"""The choice of what a resume loads, and what is said of newer checkpoints that are passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from resilience_sdk.checkpoint.history import CheckpointId, find_quarantined, find_rollbacks, skipped_steps
from resilience_sdk.checkpoint.manifest import Selection, Skipped
from resilience_sdk.checkpoint.store import CheckpointStore
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event

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
