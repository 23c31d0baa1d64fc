"""The comparison of a state that was just restored with the digests of its save, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resilience_sdk.checkpoint.ranks import Ranks, describe, find_ranks
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.resume_proof import EXACT, NOT_COMPARED, NOT_EXACT, STATE, ResumeCheck

_Digests = tuple[dict[str, str], dict[str, str]]
"""Of what is the same on all ranks, and of what this one has of its own."""
_CURE = "what gives this state has to take it back unchanged: see its load_state_dict()"
_CURE_BY_RANK = (
    "parameters that differ by rank are saved of rank 0 alone: save where all ranks have the same, as behind an "
    "average (checkpoint_every a multiple of the steps between two); else see its load_state_dict()"
)
_CURE_RNG = "a generator that is replaced or seeded at the start of the program belongs before the resume"


class ResumeProof:
    """What a checkpointer compares of a resume, and journals by `emit(event, step, **fields)`, if `is_on()`."""

    def __init__(self, emit: Callable[..., None], is_on: Callable[[], bool]) -> None:
        """Know of no resume yet."""
        self._record = emit
        self._is_on = is_on
        self._found: Mapping[str, Any] | None = None
        self._step = 0

    def restored(self, found: Mapping[str, Any], ranks: Ranks, now: Callable[[], _Digests]) -> None:
        """Compare what was restored of the checkpoint `found` with its digests. Collective, also where it is off.

        `now()`: the digests of the live objects.
        """
        self._found, self._step = found, int(found["step"])
        self._compare(found, ranks, now)

    def framework(self, objects: Callable[[], Mapping[str, Any]]) -> None:
        """Compare live objects that a framework has restored by itself, once. Collective."""
        found, self._found = self._found, None
        if found is not None:
            from resilience_sdk.checkpoint.digests import digests_of, entries_of_objects

            self._compare(found, find_ranks(), lambda: ({}, digests_of(entries_of_objects(objects()))))

    def _compare(self, found: Mapping[str, Any], ranks: Ranks, now: Callable[[], _Digests]) -> None:
        mine = None
        if self._is_on():
            mine = StateProof(found["digests"], found["world_size"], ranks).compare(now)
        answers = ranks.gather(mine)
        if ranks.rank == 0 and all(answers):
            check = state_check(answers, found["world_size"])
            self._record(check.event, self._step, **check.facts())
            if check.result == NOT_EXACT:
                say(check.line)

    def generators(self, saved: Mapping[str, Any]) -> None:
        """Compare the generators with how they were saved, just before the first batch."""
        check = generators_check(saved) if self._is_on() else None
        if check is not None:
            self._record(check.event, self._step, **check.facts())
            say_once("generators differ", check.line)


class StateProof:
    """The digests of one save as this rank compares them."""

    def __init__(self, saved: Mapping[str, Any], saved_ranks: int, ranks: Ranks) -> None:
        """Take those of the manifest, in which anything may be missing: older versions have none."""
        self._saved: dict[str, str] = {}
        own, is_alike = saved.get("ranks"), saved_ranks == ranks.size
        if (is_alike or ranks.rank == 0) and isinstance(saved.get("shared"), Mapping):
            self._saved.update(saved["shared"])
        if is_alike and isinstance(own, list) and len(own) == ranks.size:
            self._saved.update(own[ranks.rank])  # what it has otherwise than rank 0 among them
        self._has_any = bool(saved)

    def compare(self, now: Callable[[], _Digests]) -> dict[str, Any]:
        """Return what differs as a JSON value; never raises. `now()`: digests of the live objects."""
        answer: dict[str, Any] = {"differs": [], "compared": 0, "error": None, "has_any": self._has_any}
        if not self._has_any:
            return answer
        from resilience_sdk.checkpoint.digests import differing

        try:
            differs, answer["compared"] = differing(self._saved, _joined(now()))
            if differs:
                # What gives another answer each time it is asked is no state.
                again = differing(self._saved, _joined(now()))[0]
                first, second = _joined(now()), _joined(now())
                differs = [name for name in differs if name in again and first.get(name) == second.get(name)]
            answer["differs"] = differs
        except Exception as error:  # noqa: BLE001 - a proof that cannot be made ends no training
            answer["error"] = describe(error)
        return answer


def _joined(parts: _Digests) -> dict[str, str]:
    return {**parts[0], **parts[1]}


def state_check(answers: Sequence[Mapping[str, Any]], saved_ranks: int) -> ResumeCheck:
    """Return what the answers of all ranks come to. Pure."""
    for rank, answer in enumerate(answers):
        if answer["differs"]:
            component, *rest = answer["differs"]
            also = f", and {len(rest)} more" if rest else ""
            where = f" on rank {rank}" if len(answers) > 1 else ""
            text = f"{component} is not as it was saved{where}{also}"
            cure = _CURE_BY_RANK if rank and component.startswith("the state of") else _CURE
            cure = _CURE_RNG if component.startswith("the generator") else cure
            return ResumeCheck(STATE, NOT_EXACT, text, component, rank=rank, cure=cure)
    if not any(answer["has_any"] for answer in answers):
        return ResumeCheck(STATE, NOT_COMPARED, "the checkpoint has no digests, as those of an earlier version")
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            return ResumeCheck(STATE, NOT_COMPARED, f"the state cannot be read again: {answer['error']}", rank=rank)
    count = sum(answer["compared"] for answer in answers)
    if not count:
        return ResumeCheck(STATE, NOT_COMPARED, "the checkpoint has no digests of what is here")
    but = (
        f"; what each rank has of its own: not compared, {saved_ranks} ranks saved it"
        if saved_ranks != len(answers)
        else ""
    )
    return ResumeCheck(STATE, EXACT, f"{count} of {count} parts of the state equal{but}")


def generators_check(saved: Mapping[str, Any]) -> ResumeCheck | None:
    """Compare the generators with how they were saved, just before the first batch; None where they are equal."""
    from resilience_sdk.checkpoint.digests import differing, digests_of, entries_of_rng
    from resilience_sdk.checkpoint.state import capture_rng

    differs, _ = differing(digests_of(entries_of_rng(saved)), digests_of(entries_of_rng(capture_rng())))
    if not differs:
        return None
    return ResumeCheck(STATE, NOT_EXACT, f"{differs[0]} cannot be set as it was saved", differs[0], cure=_CURE_RNG)
