"""What an existing configuration of NVIDIA's resiliency extension means here.

Its `fault_tolerance:` section may sit at any depth of a YAML file, and its launcher takes the same names as
`--ft-param-<name>` (older versions) or `--ft-<name>`. Every key is translated, or named with the reason why
it has no counterpart. A bad value or an unknown name is an error: a typo must not disable a protection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.settings import parse
from resilience_sdk.settings.fields import nearest

SECTION = "fault_tolerance"


@attrs.frozen
class _Key:
    """One option of theirs: how its value is checked, and our option or the reason why there is none."""

    read: parse.Parser
    field: str | None = None
    reason: str = ""


@attrs.frozen
class Translation:
    """Values for our options, and one line per key about what became of it."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]


def _optional(reader: parse.Parser) -> parse.Parser:
    return lambda value: None if parse.is_nothing(value) else reader(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, int)):
        raise ValueError("expected text")
    return None if value is None else str(value)


def _level(value: Any) -> str:
    names = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "NOTSET")
    text = str(value).strip().upper().rpartition(".")[2]  # `logging.INFO` is written too
    if text not in names and not text.isdecimal():
        raise ValueError(f"expected a logging level such as {names[1]}")
    return text


def _any_signal(value: Any) -> str:
    # Their default is SIGKILL, which we would not take as a signal to handle.
    if str(value).strip().upper().rpartition(".")[2] in ("SIGKILL", "KILL", "9"):
        return "SIGKILL"
    return parse.signal_name(value.rpartition(".")[2] if isinstance(value, str) else value)


_COUNT = parse.whole_number(0)
_SECONDS = _optional(parse.duration_or_zero)
_HEALTH = "health checks of nodes are not part of the settings"
_REASON_PROGRESS = "attempts that end before their first completed step stop the job after three"
_REASON_ATTRIBUTION = "causes are attributed locally, without a service"

KEYS: Mapping[str, _Key] = {
    "initial_rank_heartbeat_timeout": _Key(parse.learned_duration, "initial_heartbeat_timeout"),
    "rank_heartbeat_timeout": _Key(parse.learned_duration, "heartbeat_timeout"),
    "rank_section_timeouts": _Key(parse.section_timeouts, "section_timeouts"),
    "rank_out_of_section_timeout": _Key(parse.learned_duration, "out_of_section_timeout"),
    "safety_factor": _Key(parse.number_between(0, float("inf"), low_included=False), "safety_factor"),
    "workload_check_interval": _Key(
        _SECONDS, reason="the monitor looks when a deadline is due, and every monitor_interval"
    ),
    "rank_termination_signal": _Key(_any_signal, reason="a stuck rank gets SIGTERM and, after term_grace, SIGKILL"),
    "node_health_check_interval": _Key(_SECONDS, reason=_HEALTH),
    "log_level": _Key(_level, reason="what a person must know is always one line on standard error"),
    "restart_check_interval": _Key(_SECONDS, reason="it had no effect there either"),
    "enable_nic_monitor": _Key(parse.switch, reason=_HEALTH),
    "enable_nic_healthcheck": _Key(parse.switch, reason=_HEALTH),
    "enable_dist_storage_healthcheck": _Key(parse.switch, reason=_HEALTH),
    "storage_healthcheck_path": _Key(_text, reason=_HEALTH),
    "pci_topo_file": _Key(_text, reason=_HEALTH),
    "link_down_path_template": _Key(_text, reason=_HEALTH),
    "link_state_path_template": _Key(_text, reason=_HEALTH),
    "skip_section_response": _Key(parse.switch, reason="a section never waits for an answer"),
    "segment": _Key(_optional(_COUNT), reason="ranks are placed by the launcher and the scheduler"),
    "numa_bind_strict": _Key(parse.switch, reason="NUMA binding is an option of the launcher"),
    "gpu_memory_reclaim_timeout": _Key(_SECONDS, reason="GPU memory is freed with the process"),
    "gpu_memory_tolerance_mb": _Key(
        _optional(parse.number_between(0, float("inf"))), reason="GPU memory is freed with the process"
    ),
    "gpu_memory_poll_interval": _Key(_SECONDS, reason="GPU memory is freed with the process"),
    "check_remaining_processes": _Key(parse.switch, reason="ranks are always ended with their whole session"),
    "max_no_progress_cycles": _Key(_optional(_COUNT), reason=_REASON_PROGRESS),
    "min_progress_iterations": _Key(_optional(_COUNT), reason=_REASON_PROGRESS),
    "checkpoint_iteration_file": _Key(_text, reason="steps are read from the ranks themselves"),
    "install_exception_hook": _Key(parse.switch, reason="an uncaught exception is always recorded"),
    "num_warmup_iterations": _Key(
        _optional(_COUNT), reason="the first occurrence of everything has initial_heartbeat_timeout"
    ),
    "attribution_endpoint": _Key(_text, reason=_REASON_ATTRIBUTION),
    "attribution_stop_action": _Key(_text, reason=_REASON_ATTRIBUTION),
    "attribution_export_url": _Key(_text, reason=_REASON_ATTRIBUTION),
    "cycle_info_dir": _Key(_text, reason="the journal in the run directory tells of every attempt"),
}


def find_section(data: Any, source: str) -> Mapping[Any, Any] | None:
    """Return the `fault_tolerance:` mapping at any depth of `data`, or None; two of them are an error."""
    found: list[Mapping[Any, Any]] = []
    _collect_sections(data, source, found)
    if len(found) > 1:
        raise ConfigError(f"{source}: has {len(found)} `{SECTION}:` sections; keep one")
    return found[0] if found else None


def _collect_sections(data: Any, source: str, found: list[Mapping[Any, Any]]) -> None:
    if isinstance(data, list):
        for item in data:
            _collect_sections(item, source, found)
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        if key != SECTION:
            _collect_sections(value, source, found)
        elif value is None:
            found.append({})
        elif isinstance(value, Mapping):
            found.append(value)
        else:
            raise ConfigError(f"{source}: {SECTION} is {value!r}; expected `name: value` lines under it")


def translate(
    section: Mapping[Any, Any],
    *,
    source: str,
    name_of: Callable[[str], str] = str,
    on_problem: Callable[[ConfigError], None] | None = None,
) -> Translation:
    """Return our values for a `fault_tolerance` mapping, with a note about every key.

    `name_of` spells a key as its writer did (an option or a YAML key). A bad value or unknown name goes to
    `on_problem`, which may let it pass; without it `ConfigError` is raised.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    for raw_name, raw in section.items():
        name = str(raw_name)
        try:
            note = _translate_key(name, raw, f"{source}: {name_of(name)}", values)
        except ConfigError as error:
            if on_problem is None:
                raise
            on_problem(error)
        else:
            notes.append(f"{name_of(name)}={_shown(raw)} {note}")
    return Translation(values, tuple(notes))


def _translate_key(name: str, raw: Any, source: str, values: dict[str, Any]) -> str:
    """Put what one key means into `values` and return the note about it."""
    key = KEYS.get(name)
    if key is None:
        raise ConfigError(f"{source}: unknown key of {SECTION} with value {raw!r}{nearest(name, KEYS)}")
    try:
        value = key.read(raw)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}, not {raw!r}") from None
    if key.field is None:
        return f"has no counterpart: {key.reason}"
    if key.field == "safety_factor" and value < 1:
        raise ConfigError(f"{source}: expected a factor of 1 or more, not {raw!r}: below it every step would be late")
    values[key.field] = value
    if value is None:
        return f"became {key.field}=learned (here no deadline is ever without bound)"
    unset = (
        [section for section, timeout in raw.items() if parse.is_nothing(timeout)] if isinstance(raw, Mapping) else []
    )
    learned = f"; learned: {', '.join(map(str, unset))}" if unset else ""
    return f"became {key.field}={_shown(value)}{learned}"


def say_notes(notes: tuple[str, ...], source: str) -> None:
    """Print, once per source, what became of each key."""
    if notes:
        lines = "\n".join(f"  {note}" for note in notes)
        say_once(f"nvrx:{source}", f"{source}: settings of NVIDIA's extension, translated:\n{lines}")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(item)}" for name, item in value.items()) or "{}"
    return f"{value:g}" if isinstance(value, float) else str(value)
