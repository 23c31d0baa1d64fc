"""The loader of options.

Argument > `RESILIENCE_<FIELD>` > configuration file > default, and the configuration of NVIDIA's extension.

A mistake is an error that names its source, the key, the value and the nearest known name. Only what the
*environment* of an implicit start or of a running rank says wrongly is a warning: a typo in a shell profile
must not end a training that has begun.

A file of settings has a few dozen lines. So one that is long, that is no file at all, or that multiplies itself by
aliases is refused before anything is made of it.

The `fault_tolerance:` section of NVIDIA's extension may sit at any depth of a YAML file, and its launcher takes the
same names as `--ft-param-<name>` (older versions) or `--ft-<name>`. Every key is translated, or named with the reason
why it has no counterpart. A bad value or an unknown name is an error: a typo must not disable a protection.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.settings import parse
from resilience_sdk.core.settings.fields import FIELDS, Settings, nearest, read_value
from resilience_sdk.core.settings.parse import shown
from resilience_sdk.errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_VALUES = 10_000
"""Values in a file, each counted as often as aliases repeat it."""


def read_file(path: Path) -> Mapping[Any, Any]:
    """Return the mapping in a YAML or (`*.toml`) TOML file; raise `ConfigError` naming file and cure.

    Never waits: what is no regular file is refused, be it a FIFO that nobody writes into.
    """
    text = _read_bounded(path)
    data = _parse_toml(text, path) if path.suffix.lower() == ".toml" else _parse_yaml(text, path)
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected `name: value` lines, found a {type(data).__name__}")
    return data


def _read_bounded(path: Path) -> str:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device"
                raise ConfigError(
                    f"cannot read the configuration file {path}: it is {kind}; name a regular file that holds the "
                    "settings"
                )
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(
                f"the configuration file {path} has more than {_MAX_BYTES >> 20} MiB; name a file that holds settings "
                "and nothing else"
            )
        return data.decode("utf-8")
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = str(error.strerror)
    raise ConfigError(f"cannot read the configuration file {path}: {reason}; check the path")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # else a FIFO waits for whoever writes into it


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MAX_VALUES:
            raise ConfigError(
                f"{path}: has more than {_MAX_VALUES:,} values, each counted as often as aliases (*name) repeat it; "
                f"write out the few that are settings"
            )
        return loader.construct_document(node)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - PyYAML raises whatever the value of a tag makes Python raise
        told = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path}: not valid YAML: {told}") from None


def _size(node: Any, known: dict[int, float]) -> float:
    """Return how many values a composed document has, with its aliases written out; infinite where one holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is known: who comes here meanwhile is inside it
        children = node.value if isinstance(node.value, list) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _parse_toml(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


@attrs.define
class _Found:
    """Values found so far, each with the place that it came from; a later place overrides."""

    values: dict[str, Any] = attrs.field(factory=dict)
    sources: dict[str, str] = attrs.field(factory=dict)
    problems: list[ConfigError] = attrs.field(factory=list)
    """What was wrong in the places that were looked at; whoever looked decides what it means."""

    def take(self, name: str, value: Any, source: str, *, spelt: str) -> None:
        """Keep what stands at `source`, where the option is `spelt` so; a bad value is a problem."""
        try:
            self.values[name] = read_value(name, value, source=spelt)
            self.sources[name] = source
        except ConfigError as error:
            self.problems.append(error)

    def raise_problem(self) -> None:
        """Raise the first problem."""
        if self.problems:
            raise self.problems[0]


def load_settings(
    *,
    arguments: Mapping[str, Any] | None = None,
    config_file: str | None = None,
    nvrx_file: str | None = None,
    env: Mapping[str, str] | None = None,
    strict_env: bool,
) -> Settings:
    """Return the effective settings.

    Args:
        arguments: What code or the command line said, by field name; an unknown name or bad value raises.
        config_file: YAML or TOML file of ours, or one that holds a `fault_tolerance:` section of NVIDIA's
            extension; without it the file that `RESILIENCE_CONFIG` names.
        nvrx_file: A file of which only the `fault_tolerance:` section is read; `config_file` wins over it.
        env: The environment; without it that of this process.
        strict_env: True on the command line, before ranks start: a mistake in the environment raises.
            False in an implicit start and in ranks: it is one warning, and the default holds.

    Raises:
        ConfigError: A key is unknown, a value is bad, or a file cannot be read.
    """
    env = environ.environment() if env is None else env
    identity = environ.rank_identity(env)
    speaks = identity is None or identity.rank == 0  # one warning per job, not one per rank
    found = _Found()
    if nvrx_file is not None:
        _take_file(found, nvrx_file, nvrx_only=True, speaks=speaks)
    if config_file is not None:
        _take_file(found, config_file, nvrx_only=False, speaks=speaks)
    found.raise_problem()
    if config_file is None and (named := env.get(environ.CONFIG)):
        _take_file(found, named, nvrx_only=False, speaks=speaks)
        found.problems = [ConfigError(f"{environ.CONFIG}: {error}") for error in found.problems]
    _take_environment(found, env)
    _refuse_or_warn(found.problems, is_error=strict_env, speaks=speaks)
    found.problems = []
    _take_arguments(found, arguments or {})
    try:
        return Settings(**found.values, sources=found.sources)
    except ConfigError as error:
        # Values that are good one by one but not together, such as one signal with two meanings.
        is_of_environment = all(source.startswith(environ.PREFIX) for source in found.sources.values())
        _refuse_or_warn([error], is_error=strict_env or not is_of_environment, speaks=speaks)
        return Settings()


def _refuse_or_warn(problems: list[ConfigError], *, is_error: bool, speaks: bool) -> None:
    for error in problems:
        if is_error:
            raise error
        if speaks:  # rank 0 has the same environment and says it for all
            say_once(f"settings:{error}", f"ignored, the default holds: {error}")


def override_settings(settings: Settings, arguments: Mapping[str, Any]) -> Settings:
    """Return `settings` with `arguments` (by field name) on top: those of `start_run` over the launcher's.

    Raises:
        ConfigError: An argument is unknown or has a bad value.
    """
    found = _Found({name: getattr(settings, name) for name in FIELDS}, dict(settings.sources))
    _take_arguments(found, arguments)
    return Settings(**found.values, sources=found.sources)


def _take_arguments(found: _Found, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in FIELDS:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, FIELDS)}")
        found.take(name, value, "argument", spelt=f"argument {name} (--{name.replace('_', '-')})")
    found.raise_problem()


def _take_environment(found: _Found, env: Mapping[str, str]) -> None:
    for variable in sorted(env):
        if not variable.startswith(environ.PREFIX) or variable.startswith(environ.INTERNAL_PREFIX):
            continue
        if variable in environ.NON_FIELDS:
            continue
        name = variable[len(environ.PREFIX) :].lower()
        value = env[variable]
        if name not in FIELDS or variable != variable.upper():
            known = [environ.PREFIX + name.upper() for name in FIELDS] + sorted(environ.NON_FIELDS)
            error = ConfigError(f"unknown variable {variable}={shown(value)}{nearest(variable, known)}")
            found.problems.append(error)
        elif value.strip():  # an empty variable is how shells and job templates say "not set"
            found.take(name, value, variable, spelt=variable)


def _take_file(found: _Found, file: str, *, nvrx_only: bool, speaks: bool) -> None:
    try:
        data = read_file(Path(file))
        section = find_section(data, file)
        if section is None and nvrx_only:
            raise ConfigError(f"{file}: has no `{SECTION}:` section")
    except ConfigError as error:
        found.problems.append(error)
        return
    if section is not None:
        translation = translate(section, source=file)
        found.problems += translation.problems
        found.values |= translation.values
        found.sources |= dict.fromkeys(translation.values, f"{file} ({SECTION})")
        if speaks:
            say_notes(translation.notes, file)
    if not nvrx_only:
        others = _take_own_keys(found, data, file, foreign=section is not None)
        if others and speaks:
            say_once(f"settings:others:{file}", f"{file}: not ours and not read: {', '.join(sorted(others))}")


def _take_own_keys(found: _Found, data: Mapping[Any, Any], file: str, *, foreign: bool) -> list[str]:
    """Take our options of a file. `foreign`: it also configures another program, whose keys are returned."""
    seen: set[str] = set()
    others: list[str] = []
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if key == SECTION:
            continue
        if name in seen:
            found.problems.append(ConfigError(f"{file}: {name} is given twice"))
        elif name in FIELDS:
            seen.add(name)
            found.take(name, value, file, spelt=f"{file}: {name}")
        elif foreign and (isinstance(value, (Mapping, list)) or not nearest(name, FIELDS)):
            others.append(str(key))
        else:
            what = f"unknown key {shown(key)} with value {shown(value)}{nearest(name, FIELDS)}"
            found.problems.append(ConfigError(f"{file}: {what}"))
    return others


SECTION = "fault_tolerance"
_HEALTH = "health checks of nodes are not part of the settings"
_MEMORY = "GPU memory is freed with the process"
_PROGRESS = "attempts that end before their first completed step stop the job after three"
_ATTRIBUTION = "causes are attributed locally, without a service"

TRANSLATED: Mapping[str, str] = {
    "initial_rank_heartbeat_timeout": "initial_heartbeat_timeout",
    "rank_heartbeat_timeout": "heartbeat_timeout",
    "rank_section_timeouts": "section_timeouts",
    "rank_out_of_section_timeout": "out_of_section_timeout",
    "safety_factor": "safety_factor",
}
"""Option of NVIDIA's extension -> ours."""
WITHOUT_COUNTERPART: Mapping[str, str] = {
    "workload_check_interval": "the monitor looks when a deadline is due, and every monitor_interval",
    "rank_termination_signal": "a stuck rank gets SIGTERM and, after term_grace, SIGKILL",
    "node_health_check_interval": _HEALTH,
    "log_level": "what a person must know is always one line on standard error",
    "restart_check_interval": "it had no effect there either",
    "enable_nic_monitor": _HEALTH,
    "enable_nic_healthcheck": _HEALTH,
    "enable_dist_storage_healthcheck": _HEALTH,
    "storage_healthcheck_path": _HEALTH,
    "pci_topo_file": _HEALTH,
    "link_down_path_template": _HEALTH,
    "link_state_path_template": _HEALTH,
    "skip_section_response": "a section never waits for an answer",
    "segment": "ranks are placed by the launcher and the scheduler",
    "numa_bind_strict": "NUMA binding is an option of the launcher",
    "gpu_memory_reclaim_timeout": _MEMORY,
    "gpu_memory_tolerance_mb": _MEMORY,
    "gpu_memory_poll_interval": _MEMORY,
    "check_remaining_processes": "ranks are always ended with their whole session",
    "max_no_progress_cycles": _PROGRESS,
    "min_progress_iterations": _PROGRESS,
    "checkpoint_iteration_file": "steps are read from the ranks themselves",
    "install_exception_hook": "an uncaught exception is always recorded",
    "num_warmup_iterations": "the first occurrence of everything has initial_heartbeat_timeout",
    "attribution_endpoint": _ATTRIBUTION,
    "attribution_stop_action": _ATTRIBUTION,
    "attribution_export_url": _ATTRIBUTION,
    "cycle_info_dir": "the journal in the run directory tells of every attempt",
}
"""Option of NVIDIA's extension -> the reason why there is none of ours."""
KEYS = (*TRANSLATED, *WITHOUT_COUNTERPART)


@attrs.frozen
class Translation:
    """Values for our options, one line per key about what became of it, and what was wrong."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]
    problems: tuple[ConfigError, ...]


def find_section(data: Any, source: str) -> Mapping[Any, Any] | None:
    """Return the `fault_tolerance:` mapping at any depth of `data`, or None; two of them are an error."""
    found = list(_sections(data, source))
    if len(found) > 1:
        raise ConfigError(f"{source}: has {len(found)} `{SECTION}:` sections; keep one")
    return found[0] if found else None


def _sections(data: Any, source: str) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, list):
        for item in data:
            yield from _sections(item, source)
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        if key != SECTION:
            yield from _sections(value, source)
        elif value is None or isinstance(value, Mapping):
            yield value or {}
        else:
            raise ConfigError(f"{source}: {SECTION} is {shown(value)}; expected `name: value` lines under it")


def translate(section: Mapping[Any, Any], *, source: str, name_of: Callable[[str], str] = str) -> Translation:
    """Return our values for a `fault_tolerance` mapping, with a note about every key.

    `name_of` spells a key as its writer did: an option or a YAML key.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[ConfigError] = []
    for raw_name, raw in section.items():
        name = str(raw_name)
        place, given = f"{source}: {name_of(name)}", f"{name_of(name)}={_shown(raw)}"
        if name in WITHOUT_COUNTERPART:
            notes.append(f"{given} has no counterpart: {WITHOUT_COUNTERPART[name]}")
        elif name not in TRANSLATED:
            what = f"unknown key of {SECTION} with value {shown(raw)}{nearest(name, list(KEYS))}"
            problems.append(ConfigError(f"{place}: {what}"))
        else:
            field = TRANSLATED[name]
            try:
                values[field] = read_value(field, raw, source=place)
            except ConfigError as error:
                problems.append(error)
            else:
                notes.append(f"{given} became {field}={_meaning(values[field], raw)}")
    return Translation(values, tuple(notes), tuple(problems))


def _meaning(value: Any, raw: Any) -> str:
    if value is None:
        return "learned (here no deadline is ever without bound)"
    given = raw.items() if isinstance(raw, Mapping) else ()
    unset = [str(section) for section, timeout in given if parse.is_nothing(timeout)]
    return _shown(value) + (f"; learned: {', '.join(unset)}" if unset else "")


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


LIBRARIES: Mapping[str, tuple[str, str]] = {
    "prometheus_address": ("prometheus_client", "prometheus"),
    "prometheus_textfile": ("prometheus_client", "prometheus"),
    "otlp_endpoint": ("opentelemetry.exporter.otlp.proto.http", "otel"),
    "tensorboard_dir": ("tensorboard", "tensorboard"),
    "wandb_project": ("wandb", "wandb"),
    "mlflow_uri": ("mlflow", "mlflow"),
    "db": ("sqlalchemy", "history"),
}
"""Setting that names a sink -> its library, and the extra that brings it."""


def missing(settings: Settings) -> dict[str, str]:
    """Return the sinks that are set and whose library is not installed: setting -> what to say. Imports no library."""
    return {
        name: f"{name} is set, and {library} is not installed, so nothing goes there: "
        f"pip install 'resilience-sdk[{extra}]'"
        for name, (library, extra) in LIBRARIES.items()
        if getattr(settings, name) is not None and not _is_installed(library)
    }


def without(settings: Settings, names: Mapping[str, object]) -> Settings:
    """Return the settings with these sinks unset."""
    unset: dict[str, Any] = dict.fromkeys(names)
    return attrs.evolve(settings, **unset) if names else settings


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None  # imports its parent packages, which are empty
    except (ImportError, ValueError):
        return False
