"""The comparison of a state that was just restored with the digests of its save, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resilience_sdk.checkpoint import digests
from resilience_sdk.checkpoint.ranks import Ranks, describe
from resilience_sdk.checkpoint.state import capture_rng
from resilience_sdk.core.resume_proof import EXACT, NOT_COMPARED, NOT_EXACT, STATE, ResumeCheck

_CURE = "what gives this state has to take it back unchanged: see its load_state_dict()"
_CURE_RNG = "a generator that is replaced or seeded at the start of the program belongs before the resume"


class StateProof:
    """The digests of one save as this rank compares them."""

    def __init__(self, saved: Mapping[str, Any], saved_ranks: int, ranks: Ranks) -> None:
        """Take those of the manifest, in which anything may be missing: older versions have none."""
        self._saved: dict[str, str] = {}
        own = saved.get("ranks")
        if ranks.rank == 0 and isinstance(saved.get("shared"), Mapping):
            self._saved.update(saved["shared"])
        if saved_ranks == ranks.size and isinstance(own, list) and len(own) == ranks.size:
            self._saved.update(own[ranks.rank])
        self._has_any = bool(saved)

    def compare(self, now: Callable[[], tuple[dict[str, str], dict[str, str]]]) -> dict[str, Any]:
        """Return what differs as a JSON value; never raises. `now()`: digests of the live objects."""
        answer: dict[str, Any] = {"differs": [], "compared": 0, "error": None, "has_any": self._has_any}
        if not self._has_any:
            return answer
        try:
            differs, answer["compared"] = digests.differing(self._saved, _joined(now()))
            if differs:
                # What gives another answer each time it is asked is no state.
                again = digests.differing(self._saved, _joined(now()))[0]
                first, second = _joined(now()), _joined(now())
                differs = [name for name in differs if name in again and first.get(name) == second.get(name)]
            answer["differs"] = differs
        except Exception as error:  # noqa: BLE001 - a proof that cannot be made ends no training
            answer["error"] = describe(error)
        return answer


def _joined(parts: tuple[dict[str, str], dict[str, str]]) -> dict[str, str]:
    return {**parts[0], **parts[1]}


def state_check(answers: Sequence[Mapping[str, Any]], saved_ranks: int) -> ResumeCheck:
    """Return what the answers of all ranks come to. Pure."""
    for rank, answer in enumerate(answers):
        if answer["differs"]:
            component, *rest = answer["differs"]
            also = f", and {len(rest)} more" if rest else ""
            where = f" on rank {rank}" if len(answers) > 1 else ""
            text = f"{component} is not as it was saved{where}{also}"
            cure = _CURE_RNG if component.startswith("the generator") else _CURE
            return ResumeCheck(STATE, NOT_EXACT, text, component, rank=rank, cure=cure)
    if not any(answer["has_any"] for answer in answers):
        return ResumeCheck(STATE, NOT_COMPARED, "the checkpoint has no digests, as those of an earlier version")
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            return ResumeCheck(STATE, NOT_COMPARED, f"the state cannot be read again: {answer['error']}", rank=rank)
    count = sum(answer["compared"] for answer in answers)
    but = (
        f"; what each rank has of its own: not compared, {saved_ranks} ranks saved it"
        if saved_ranks != len(answers)
        else ""
    )
    return ResumeCheck(STATE, EXACT, f"{count} of {count} parts of the state equal{but}")


def generators_check(saved: Mapping[str, Any]) -> ResumeCheck | None:
    """Compare the generators with how they were saved, just before the first batch; None where they are equal."""
    differs, _ = digests.differing(
        digests.digests_of(digests.entries_of_rng(saved)), digests.digests_of(digests.entries_of_rng(capture_rng()))
    )
    if not differs:
        return None
    return ResumeCheck(STATE, NOT_EXACT, f"{differs[0]} cannot be set as it was saved", differs[0], cure=_CURE_RNG)
