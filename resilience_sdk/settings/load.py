"""Where options come from: argument > `RESILIENCE_<FIELD>` > configuration file > default.

A mistake is an error that names its source, the key, the value and the nearest known name. Only what the
*environment* of an implicit start or of a running rank says wrongly is a warning: a typo in a shell profile
must not end a training that has begun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import environ
from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.settings.fields import FIELDS, Settings, nearest, read_value

OnProblem = Callable[[ConfigError], None]


@attrs.define
class _Found:
    """Values found so far, each with the place that it came from; a later place overrides."""

    values: dict[str, Any] = attrs.field(factory=dict)
    sources: dict[str, str] = attrs.field(factory=dict)

    def take(self, name: str, value: Any, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source


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
    on_env_problem = _raise if strict_env else (_warn if speaks else _ignore)
    found = _Found()
    if nvrx_file is not None:
        _take_file(found, nvrx_file, nvrx_only=True, on_problem=_raise, speaks=speaks)
    if config_file is not None:
        _take_file(found, config_file, nvrx_only=False, on_problem=_raise, speaks=speaks)
    elif named := env.get(environ.CONFIG):

        def on_problem(error: ConfigError) -> None:
            on_env_problem(ConfigError(f"{environ.CONFIG}: {error}"))

        _take_file(found, named, nvrx_only=False, on_problem=on_problem, speaks=speaks)
    _take_environment(found, env, on_env_problem)
    _take_arguments(found, arguments or {})
    try:
        return Settings(**found.values, sources=found.sources)
    except ConfigError as error:
        # Values that are good one by one but not together, such as one signal with two meanings.
        if strict_env or not _only_environment(found):
            raise
        on_env_problem(error)
        return Settings()


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
        option = f"--{name.replace('_', '-')}"
        found.take(name, read_value(name, value, source=f"argument {name} ({option})"), "argument")


def _take_environment(found: _Found, env: Mapping[str, str], on_problem: OnProblem) -> None:
    for variable in sorted(env):
        if not variable.startswith(environ.PREFIX) or variable.startswith(environ.INTERNAL_PREFIX):
            continue
        if variable in environ.NON_FIELDS:
            continue
        name = variable[len(environ.PREFIX) :].lower()
        value = env[variable]
        try:
            if name not in FIELDS or variable != variable.upper():
                raise ConfigError(f"unknown variable {variable}={value!r}{nearest(variable, _variables())}")
            # An empty variable is how shells and job templates say "not set".
            if value.strip():
                found.take(name, read_value(name, value, source=variable), variable)
        except ConfigError as error:
            on_problem(error)


def _variables() -> list[str]:
    return [environ.PREFIX + name.upper() for name in FIELDS] + sorted(environ.NON_FIELDS)


def _take_file(found: _Found, file: str, *, nvrx_only: bool, on_problem: OnProblem, speaks: bool) -> None:
    from resilience_sdk.settings import nvrx  # only who reads a file pays for it

    try:
        data = read_file(Path(file))
        section = nvrx.find_section(data, file)
        if section is None and nvrx_only:
            raise ConfigError(f"{file}: has no `{nvrx.SECTION}:` section")
    except ConfigError as error:
        on_problem(error)
        return
    if section is not None:
        translation = nvrx.translate(section, source=file, on_problem=on_problem)
        for name, value in translation.values.items():
            found.take(name, value, f"{file} ({nvrx.SECTION})")
        if speaks:
            nvrx.say_notes(translation.notes, file)
    if not nvrx_only:
        own = _own_keys(data, file, foreign=section is not None, on_problem=on_problem, speaks=speaks)
        for name, value in own:
            try:
                found.take(name, read_value(name, value, source=f"{file}: {name}"), file)
            except ConfigError as error:
                on_problem(error)


def _own_keys(
    data: Mapping[Any, Any], file: str, *, foreign: bool, on_problem: OnProblem, speaks: bool
) -> Iterable[tuple[str, Any]]:
    """Yield our options of a file; `foreign`: it also configures another program, whose keys are named."""
    seen: set[str] = set()
    others: list[str] = []
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name in seen:
            on_problem(ConfigError(f"{file}: {name} is given twice"))
        elif name in FIELDS:
            seen.add(name)
            yield name, value
        elif foreign and (isinstance(value, (Mapping, list)) or not nearest(name, FIELDS)):
            others.append(str(key))
        else:
            on_problem(ConfigError(f"{file}: unknown key {key!r} with value {value!r}{nearest(name, FIELDS)}"))
    if foreign and speaks and (rest := [key for key in others if key != "fault_tolerance"]):
        say_once(f"settings:others:{file}", f"{file}: not ours and not read: {', '.join(sorted(rest))}")


def read_file(path: Path) -> Mapping[Any, Any]:
    """Return the mapping in a YAML or (`*.toml`) TOML file; raise `ConfigError` naming file and cure."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration file {path}: {reason}; check the path") from None
    data = _parse_toml(text, path) if path.suffix.lower() == ".toml" else _parse_yaml(text, path)
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected `name: value` lines, found a {type(data).__name__}")
    return data


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _parse_toml(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _only_environment(found: _Found) -> bool:
    return all(source.startswith(environ.PREFIX) for source in found.sources.values())


def _raise(error: ConfigError) -> None:
    raise error


def _warn(error: ConfigError) -> None:
    say_once(f"settings:{error}", f"ignored, the default holds: {error}")


def _ignore(error: ConfigError) -> None:
    """Say nothing: rank 0 has the same environment and says it for all."""
