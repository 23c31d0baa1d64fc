"""Timeouts as NVRx has them: the configuration, those in force, and those that measured times give. Pure.

A calculated timeout is `safety_factor` times the longest time that any rank has measured, and counts before a
configured one. Where the one in force was calculated too, the new one is the mean of both. None is "not set": then
the deadlines of the SDK hold, which are learned.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.plain_file import plain
from resilience_sdk.core.settings import nvrx, parse
from resilience_sdk.core.settings.load import read_file

_LEVELS = {"DBG": logging.DEBUG, "WARN": logging.WARNING}
_SECONDS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout")


@dataclasses.dataclass
class FaultToleranceConfig:
    """What a `fault_tolerance:` section may hold in NVRx 0.4.1, with its defaults; durations are seconds.

    Of newer keys those are known that are timeouts; `resilience run` says what became of each. A dataclass of the
    standard library, because scripts take it for one. Raises ValueError for a value that cannot be read.
    """

    workload_check_interval: float = 5.0
    initial_rank_heartbeat_timeout: float | None = 3600.0
    rank_heartbeat_timeout: float | None = 2700.0
    rank_section_timeouts: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    node_health_check_interval: float = 5.0
    safety_factor: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = logging.INFO
    restart_check_interval: float = 60.0
    enable_nic_monitor: bool = True
    pci_topo_file: str | None = None
    link_down_path_template: str | None = None

    def __post_init__(self) -> None:
        self.workload_check_interval = parse.duration_or_zero(self.workload_check_interval)
        for name in _SECONDS:
            setattr(self, name, parse.learned_duration(getattr(self, name)))
        self.rank_section_timeouts = read_sections(self.rank_section_timeouts)
        self.safety_factor = parse.number_between(1, float("inf"))(self.safety_factor)
        self.rank_termination_signal = _signal(self.rank_termination_signal)
        self.log_level = _level(self.log_level)

    @staticmethod
    def from_kwargs(ignore_not_recognized: bool = True, **kwargs: Any) -> FaultToleranceConfig:
        """Return a configuration of these values; an unknown name is ignored, or a ValueError."""
        known = {field.name for field in dataclasses.fields(FaultToleranceConfig)}
        if unknown := sorted(set(kwargs) - known):
            if not ignore_not_recognized:
                raise ValueError(f"not recognized: {', '.join(unknown)}")
            kwargs = {name: value for name, value in kwargs.items() if name in known}
        return FaultToleranceConfig(**kwargs)

    @staticmethod
    def from_yaml_file(cfg_path: str, ignore_not_recognized: bool = True) -> FaultToleranceConfig:
        """Return what the `fault_tolerance:` section of a YAML file says; ValueError where there is none."""
        section = nvrx.find_section(read_file(Path(cfg_path)), str(cfg_path))
        if section is None:
            raise ValueError(f"{cfg_path} has no `{nvrx.SECTION}:` section")
        return FaultToleranceConfig.from_kwargs(ignore_not_recognized, **{str(k): v for k, v in section.items()})

    def to_yaml_file(self, cfg_path: str) -> None:
        """Write it as the `fault_tolerance:` section of a YAML file."""
        import yaml

        self.__post_init__()  # fields may have been set since
        values = {**dataclasses.asdict(self), "rank_termination_signal": self.rank_termination_signal.name}
        with open(cfg_path, "w", encoding="utf-8", opener=plain) as file:
            file.write(yaml.safe_dump({nvrx.SECTION: values}))


def read_sections(value: Any) -> dict[str, float | None]:
    """Return the timeouts by section, from a mapping or from `a:10,b:null`; unlike a setting it keeps those unset."""
    if isinstance(value, str):
        pairs: Iterable[tuple[Any, Any]] = [
            (name.strip(), timeout) for name, _, timeout in (item.rpartition(":") for item in value.split(",")) if name
        ]
    else:
        pairs = dict(value or {}).items()
    return {str(name): parse.learned_duration(timeout) for name, timeout in pairs}


def _signal(value: Any) -> signal.Signals:
    number = getattr(signal, value.upper(), -1) if isinstance(value, str) else value
    try:
        return signal.Signals(number)
    except ValueError:
        raise ValueError(f"rank_termination_signal: there is no signal {value!r}") from None


def _level(value: Any) -> int:
    name = str(value).upper()
    level = value if isinstance(value, int) else _LEVELS.get(name, logging.getLevelName(name))
    if not isinstance(level, int) or not logging.DEBUG <= level <= logging.CRITICAL:
        raise ValueError(f"log_level: expected a level of logging from DEBUG to CRITICAL, not {value!r}")
    return level


def _shown(seconds: float | None) -> str:
    return "None" if seconds is None else f"{seconds:.2f}"


@dataclasses.dataclass
class HeartbeatTimeouts:
    """Timeouts of heartbeats in seconds: until the first one, and between two."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None

    def __str__(self) -> str:
        initial, subsequent = _shown(self.initial), _shown(self.subsequent)
        calculated = f"were_calculated={self.were_calculated}"
        return f"HeartbeatTimeouts(initial={initial}, subsequent={subsequent}, {calculated})"

    @property
    def are_valid(self) -> bool:
        """Whether both are set."""
        return self.initial is not None and self.subsequent is not None


@dataclasses.dataclass
class SectionTimeouts:
    """Timeouts of sections in seconds, and of the time in which none is open; which of them were calculated."""

    section: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: set[str] = dataclasses.field(default_factory=set)
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)

    def __str__(self) -> str:
        sections = ", ".join(f"{name}={_shown(seconds)}" for name, seconds in self.section.items())
        calculated = sorted(self.calculated_sections)
        outside = f"{_shown(self.out_of_section)}, calculated: {self.is_out_of_section_calculated}"
        return f"SectionTimeouts(sections=[{sections}], calculated_sections={calculated}, out_of_section={outside})"

    @property
    def were_calculated(self) -> bool:
        """Whether all of them were."""
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        """Whether all of them are set."""
        return self.out_of_section is not None and None not in self.section.values()


@attrs.define
class Longest:
    """The longest times that were measured, in seconds of a monotonic clock; None: none was."""

    started: float
    initial: float | None = None
    """Until the first heartbeat."""
    subsequent: float | None = None
    """Between two heartbeats."""
    out_of_section: float | None = None
    sections: dict[str, float | None] = attrs.field(factory=dict)
    """By name, of those that are closed."""
    opened: dict[str, float] = attrs.field(factory=dict)
    """When each section was entered that is open."""
    _beat: float | None = None
    _left: float = attrs.field(default=attrs.Factory(lambda self: self.started, takes_self=True))

    def beat(self, now: float) -> None:
        """Take a heartbeat."""
        if self._beat is None:
            self.initial = _longer(self.initial, now - self.started)
        else:
            self.subsequent = _longer(self.subsequent, now - self._beat)
        self._beat = now

    def open(self, section: str, now: float) -> None:
        """Take the start of a section; ValueError where it is open."""
        if section in self.opened:
            raise ValueError(f"section {section} is open already: end it before it is started again")
        self.note_out_of_section(now)
        self.opened[section] = now

    def close(self, section: str, now: float) -> None:
        """Take the end of a section; ValueError where it is not open."""
        if section not in self.opened:
            raise ValueError(f"section {section} is not open")
        self.sections[section] = _longer(self.sections.get(section), now - self.opened.pop(section))
        if not self.opened:
            self._left = now

    def note_out_of_section(self, now: float) -> None:
        """Take the time since the last section was closed, where none is open."""
        if not self.opened:
            self.out_of_section = _longer(self.out_of_section, now - self._left)

    def to_json(self) -> dict[str, Any]:
        """Return what other ranks have to know."""
        return {name: getattr(self, name) for name in ("initial", "subsequent", "out_of_section", "sections")}

    def take_longer(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Take what other ranks have measured, where that is longer."""
        for other in told:
            for name in ("initial", "subsequent", "out_of_section"):
                setattr(self, name, _longer(getattr(self, name), other[name]))
            for section, seconds in other["sections"].items():
                self.sections[section] = _longer(self.sections.get(section), seconds)


def _longer(one: float | None, other: float | None) -> float | None:
    return max((seconds for seconds in (one, other) if seconds is not None), default=None)


def heartbeat_timeouts(longest: Longest, factor: float, current: HeartbeatTimeouts) -> HeartbeatTimeouts | None:
    """Return timeouts made of what was measured; None where there were not two heartbeats."""
    if not longest.initial or not longest.subsequent:
        return None
    old = current if current.were_calculated else HeartbeatTimeouts()
    return HeartbeatTimeouts(
        _merged(factor * longest.initial, old.initial), _merged(factor * longest.subsequent, old.subsequent), True
    )


def section_timeouts(
    longest: Longest,
    factor: float,
    current: SectionTimeouts,
    *,
    selected: Collection[str] | None = None,
    with_out_of_section: bool = True,
) -> SectionTimeouts | None:
    """Return timeouts made of what was measured of the selected sections (None: all), the others as they are.

    None where one of these was never closed, or nothing was measured out of sections and that is asked for.
    """
    names = set(longest.sections) | set(current.section) if selected is None else set(selected)
    measured = {name: longest.sections.get(name) for name in names}
    outside = longest.out_of_section
    if not all(measured.values()) or (with_out_of_section and not outside):
        return None
    sections = dict(current.section)
    for name, seconds in sorted(measured.items()):
        old = current.section.get(name) if name in current.calculated_sections else None
        sections[name] = _merged(factor * (seconds or 0.0), old)
    new = SectionTimeouts(
        sections, current.out_of_section, current.calculated_sections | names, current.is_out_of_section_calculated
    )
    if with_out_of_section:
        old = current.out_of_section if current.is_out_of_section_calculated else None
        new.out_of_section, new.is_out_of_section_calculated = _merged(factor * (outside or 0.0), old), True
    return new


def _merged(new: float, old: float | None) -> float:
    return new if old is None else 0.5 * new + 0.5 * old
