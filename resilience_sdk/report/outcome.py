"""The outcome of a run's last job, as `outcome.json`, the finished flag or its supervisor tell it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.core.journal import Event
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import ConfigError

# One JSON file of ours is a few kilobytes; a larger one is not ours.
_MOST_BYTES = 1 << 22
_TEXTS = ("verdict", "reason", "what", "resume", "job", "node", "run_dir", "stood", "advice")
_COUNTS = ("exit_code", "attempts", "checkpoint")
_TIMES = ("started_at", "ended_at")
KEYS = (*_TEXTS, *_COUNTS, *_TIMES, "incidents", "not_taken", "free")


def read_outcome(run_dir: RunDirectory) -> dict[str, Any] | None:
    """Return the stable keys of `outcome.json` (null where a value is missing or misshapen).

    Where only the finished flag is there, that is the outcome. None when the job has not ended.

    Raises:
        ConfigError: The file cannot be read.
    """
    data = read_json_object(run_dir.outcome)
    if data is None:
        if not run_dir.is_finished():
            return None
        data = {"verdict": "finished", "exit_code": 0, "reason": "the finished flag is set"}
    outcome: dict[str, Any] = {key: data.get(key) for key in KEYS}
    for key in _TEXTS:
        outcome[key] = outcome[key] if isinstance(outcome[key], str) else None
    for key in _COUNTS:
        outcome[key] = outcome[key] if type(outcome[key]) is int else None
    for key in _TIMES:
        outcome[key] = outcome[key] if type(outcome[key]) in (int, float) else None
    outcome["free"] = outcome["free"] is True
    for key in ("incidents", "not_taken"):
        found = outcome[key] if isinstance(outcome[key], list) else []
        outcome[key] = [text for text in found if isinstance(text, str)]
    # The directory may have been moved or copied since: what is told, and run again, is told of where it is now.
    written_in, outcome["run_dir"] = outcome["run_dir"], str(run_dir.path)
    if written_in and outcome["resume"]:
        outcome["resume"] = _moved(outcome["resume"], written_in, outcome["run_dir"])
    return outcome


def _moved(command: str, before: str, now: str) -> str:
    """Return a command line with the run directory's place of now where it names that of before."""
    word = rf"(?<![^\s=]){re.escape(shlex.quote(before))}(?!\S)"
    return re.sub(word, lambda _: shlex.quote(now), command, count=1)


def supervised_end(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the last command under `resilience supervise` ended, where that is the last thing that happened.

    A command that uses nothing of the SDK leaves no outcome of its own.
    """
    last = events[-1] if events else {}
    if last.get("event") != Event.DECISION.value or last.get("what") != "supervise" or last.get("exit_code") is None:
        return None
    return f"its command recorded nothing; resilience supervise ended with {last['exit_code']}: {last.get('reason')}"


def read_json_object(path: Any) -> dict[str, Any] | None:
    """Return the JSON object in `path`, None when there is no such file.

    Raises:
        ConfigError: It cannot be read or is no JSON object; the message names it.
    """
    try:
        with open_to_read(path) as file:
            data = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is torn or was changed: it holds no JSON") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} was changed: it holds no JSON object")
    return data
