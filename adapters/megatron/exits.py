"""Megatron's exit codes of its rerun state machine, told to whoever explains the end of a rank.

The code stays what it is, since schedulers know it. What is recorded beside it is what it means.
"""

from __future__ import annotations

from resilience_sdk.adapters.megatron import surroundings
from resilience_sdk.session.lifecycle import current

RESUME_TO_DISAMBIGUATE = 16
FAILED_ON_RESULT_VALIDATION = 17


class RerunElsewhereError(Exception):
    """A result was unexpected, and the same again on the same GPU: another GPU has to compute it, to tell why."""


class ResultRejectedError(Exception):
    """A result did not pass its validation, and Megatron has come to the end of its reruns."""


def meaning_of(code: object, suspect: str = "") -> Exception | None:
    """Return what an exit code of Megatron means, None where it is none of its own. Pure."""
    where = f" (first seen on {suspect})" if suspect else ""
    if code == RESUME_TO_DISAMBIGUATE:
        return RerunElsewhereError(
            "Megatron left with 16: an unexpected result came again on the same GPU, and the last step has to be "
            f"computed on another one: resume the job on other nodes{where}"
        )
    if code == FAILED_ON_RESULT_VALIDATION:
        return ResultRejectedError(
            "Megatron left with 17: a result failed its validation; its log says whether it came again (a transient "
            f"error of a GPU, a persistent one, or the right result of the program){where}"
        )
    return None


def record(error: BaseException | None) -> None:
    """Leave what Megatron's exit code means for the incident, if that is how this rank ends. Never raises."""
    if not isinstance(error, SystemExit):
        return
    meaning = meaning_of(error.code, _suspect())
    session = current()
    if meaning is not None and session is not None:
        session.record_exception(meaning)


def _suspect() -> str:
    """Return which device the rerun state machine suspects; empty where it says nothing."""
    machine = getattr(surroundings.module("core.rerun_state_machine"), "_GLOBAL_RERUN_STATE_MACHINE", None)
    node, device = getattr(machine, "suspicious_node", None), getattr(machine, "suspicious_device", None)
    return "" if node is None else f"node {node}, GPU {device}"
