"""The loader of options.

Argument > `RESILIENCE_<FIELD>` > configuration file > default, and the configuration of NVIDIA's extension.

A mistake is an error that names its source, the key, the value and the nearest known name. Only what the
*environment* of an implicit start or of a running rank says wrongly is a warning: a typo in a shell profile
must not end a training that has begun.

A file of settings has a few dozen lines. So one that is long, that is no file at all, or that multiplies itself by
aliases is refused before anything is made of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.plain_file import NotAPlainFileError, open_to_read
from resilience_sdk.core.settings import nvrx
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
        with open_to_read(path) as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(
                f"the configuration file {path} has more than {_MAX_BYTES >> 20} MiB; name a file that holds settings "
                "and nothing else"
            )
        return data.decode("utf-8")
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except NotAPlainFileError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}; name a regular file that holds the settings"
        ) from None
    except OSError as error:
        reason = str(error.strerror)
    raise ConfigError(f"cannot read the configuration file {path}: {reason}; check the path")


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
        section = nvrx.find_section(data, file)
        if section is None and nvrx_only:
            raise ConfigError(f"{file}: has no `{nvrx.SECTION}:` section")
    except ConfigError as error:
        found.problems.append(error)
        return
    if section is not None:
        translation = nvrx.translate(section, source=file)
        found.problems += translation.problems
        found.values |= translation.values
        found.sources |= dict.fromkeys(translation.values, f"{file} ({nvrx.SECTION})")
        if speaks:
            nvrx.say_notes(translation.notes, file)
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
        if key == nvrx.SECTION:
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
