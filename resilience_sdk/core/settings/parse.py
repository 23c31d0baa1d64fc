"""Parsers of written values: durations, signals, switches, section timeouts.

Every parser takes what a person, a YAML or TOML file or Python code may give (`"10min"`, `600`, `600.0`) and
returns the one canonical form. It raises `ValueError` whose text says what was expected; the caller knows
who gave the value and adds that.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from resilience_sdk.core.journal import Event

Parser = Callable[[Any], Any]

_UNITS_S = {
    unit: seconds
    for units, seconds in (
        ("ms", 0.001),
        ("s sec second seconds", 1.0),
        ("m min minute minutes", 60.0),
        ("h hour hours", 3600.0),
        ("d day days", 86400.0),
    )
    for unit in units.split()
}
_PART = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z]+)", re.IGNORECASE)
_NOTHING = frozenset({"", "none", "null", "~", "learned"})
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
SWITCH_WORDS = _YES | _NO
_REALTIME = re.compile(r"(?:SIG)?(?P<base>RTMIN|RTMAX)(?P<offset>[+-]\d+)?", re.IGNORECASE)
_BASE_URL = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?", re.IGNORECASE)
_WEB_ADDRESS = re.compile(r"https?://[^\s#]+", re.IGNORECASE)
_LISTEN = re.compile(
    r"(?:(?:\[(?P<v6>[0-9a-fA-F:.%\w]{2,60})\]|(?P<host>[A-Za-z0-9_.-]{1,253})):)?(?P<port>[0-9]{1,5})", re.ASCII
)
_TOKEN = re.compile(r"[!-~]{1,256}", re.ASCII)
_LAST_PORT = 65535
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
# Those that no process can handle: asking for them is always a mistake.
_NOT_CATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})


def shown(value: Any) -> str:
    """Return a value as an error message shows it: its `repr`, cut where it is long."""
    return _SHORT.repr(value)


_DURATION = 'expected seconds as a number, or a duration such as "30s", "10min" or "1h30m"'
_SECTIONS = 'expected seconds by section, such as "checkpoint:900,eval:600"'


def duration_s(value: Any) -> float:
    """Return seconds from a number or from text such as `90`, `"30s"`, `"10min"`, `"1h30m"`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(_DURATION)
    try:
        seconds = float(value)
    except OverflowError:  # of a whole number that has hundreds of digits
        seconds = math.inf
    except ValueError:
        seconds = _sum_of_parts(str(value).strip())
    if not math.isfinite(seconds):
        raise ValueError(f"{_DURATION}; it must be finite")
    return seconds


def _sum_of_parts(text: str) -> float:
    total, position = 0.0, 0
    while position < len(text) or not text:
        part = _PART.match(text, position)
        if part is None or part["unit"].lower() not in _UNITS_S:
            raise ValueError(_DURATION)
        total += float(part["number"]) * _UNITS_S[part["unit"].lower()]
        position = part.end()
    return total


def positive_duration(value: Any) -> float:
    """Return a duration in seconds that is above 0."""
    seconds = duration_s(value)
    if seconds <= 0:
        raise ValueError("expected a duration above 0 s")
    return seconds


def duration_or_zero(value: Any) -> float:
    """Return a duration in seconds that is 0 or more."""
    seconds = duration_s(value)
    if seconds < 0:
        raise ValueError("expected a duration of 0 s or more")
    return seconds


def optional_duration(value: Any) -> float | None:
    """Return a duration of 0 s or more, or None (also `null` or `none`) where nothing is said."""
    return None if is_nothing(value) else duration_or_zero(value)


def learned_duration(value: Any) -> float | None:
    """Return a duration above 0 s, or None (also `null`, `none`, `learned`) for the learned deadline."""
    return None if is_nothing(value) else positive_duration(value)


def is_nothing(value: Any) -> bool:
    """Tell whether `value` is one of the spellings of "not set"."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def switch(value: Any) -> bool:
    """Return a truth value from a boolean or from `true/false`, `yes/no`, `on/off`, `1/0`."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    raise ValueError("expected true or false")


def whole_number(minimum: int) -> Parser:
    """Return a parser of integers that are at least `minimum`."""

    def parse(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or number < minimum:
            raise ValueError(f"expected a whole number, {minimum} or more")
        return number

    return parse


def number_between(low: float, high: float, *, low_included: bool = True) -> Parser:
    """Return a parser of finite numbers in `[low, high]`, or `(low, high]`."""
    bounds = f"{'from' if low_included else 'above'} {low:g}" + ("" if math.isinf(high) else f" up to {high:g}")

    def parse(value: Any) -> float:
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or not low <= number <= high or (number == low and not low_included):
            raise ValueError(f"expected a number {bounds}")
        return number

    return parse


def choice(*allowed: str, optional: bool = False) -> Parser:
    """Return a parser that accepts one of `allowed` (in any case), and None where `optional`."""

    def parse(value: Any) -> str | None:
        if optional and is_nothing(value):
            return None
        text = value.strip().lower() if isinstance(value, str) else None
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text

    return parse


def choice_or_off(*allowed: str) -> Parser:
    """Return a parser that accepts one of `allowed` or `off`, which YAML reads as false."""
    read = choice("off", *allowed)
    return lambda value: read("off" if value is False else value)


def _matching(pattern: re.Pattern[str], value: Any, expected: str) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not pattern.fullmatch(text):
        raise ValueError(f"expected {expected}")
    return text


def base_url(value: Any) -> str | None:
    """Return the address of a web service without a slash at its end, or None."""
    if is_nothing(value):
        return None
    return _matching(_BASE_URL, value, "a URL such as http://127.0.0.1:8080").rstrip("/")


def web_address(value: Any) -> str | None:
    """Return an address that something is posted to, with its query and as it was given, or None."""
    if is_nothing(value):
        return None
    return _matching(_WEB_ADDRESS, value, "a URL such as https://hooks.example.org/T0/B0")


def listen_address(value: Any) -> tuple[str, int] | None:
    """Return host and port from `9464`, `0.0.0.0:9464` or `[::1]:9464` (a port alone: loopback only), or None."""
    if is_nothing(value):
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2:
        host, port = value
        value = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    match = _LISTEN.fullmatch(str(value).strip())
    if match is None or int(match["port"]) > _LAST_PORT:
        raise ValueError("expected a port or an address such as 9464 or 127.0.0.1:9464 (port 0: any that is free)")
    return match["v6"] or match["host"] or "127.0.0.1", int(match["port"])


def token(value: Any) -> str | None:
    """Return a token of visible ASCII characters, or None where none was given (`none` is a choice of its own)."""
    return None if value is None or value == "" else _matching(_TOKEN, value, "1 to 256 visible ASCII characters")


def plain_name(value: Any) -> str | None:
    """Return a name of letters, digits and `_.-`, 64 characters at most; nothing (None, "") means none."""
    if is_nothing(value):
        return None
    return _matching(_PLAIN_NAME, value, "a name of letters, digits and _.- with 64 characters at most")


def event_names(value: Any) -> tuple[str, ...]:
    """Return names of events, each once, from a list or from text such as `incident,finished`."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ValueError("expected names of events such as incident,finished")
    names = tuple(dict.fromkeys(str(item).strip().lower() for item in items if str(item).strip()))
    known = [event.value for event in Event]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"expected names of events ({', '.join(known)}); there is no {wrong[0]}")
    return names


def tracking_uri(value: Any) -> str | None:
    """Return where MLflow tracks: a URI, or a path as one; None for none."""
    if is_nothing(value):
        return None
    text = path_text(value)
    return text if text is None or "://" in text else f"file://{os.path.abspath(text)}"


def database(value: Any) -> str | None:
    """Return a database's URL, or the absolute path of its file; None for none."""
    if is_nothing(value):
        return None
    text = path_text(value)
    return text if text is None or "://" in text else os.path.abspath(text)


def path_text(value: Any) -> str | None:
    """Return a path as text, or None; a home directory (`~/`) is expanded, an empty path is an error."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("expected a path")
    text = os.path.expanduser(os.fspath(value))
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError("expected a path that is not empty")
    return text


def signal_number(value: Any) -> int:
    """Return the number of a catchable signal given by number or name (`USR1`, `SIGTERM`, `SIGRTMAX-3`)."""
    number = _signal_number(value)
    if number is None or number not in signal.valid_signals():
        raise ValueError('expected a signal by number or name, such as "SIGUSR2" or "SIGRTMAX-3"')
    if _number_name(number) in _NOT_CATCHABLE:
        raise ValueError(f"expected a signal that can be handled; {_number_name(number)} cannot")
    return number


def _signal_number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    text = str(int(value) if isinstance(value, int) else value).strip().upper()
    if text.isdecimal():
        return int(text)
    if match := _REALTIME.fullmatch(text):
        base = getattr(signal, f"SIG{match['base']}", None)
        return None if base is None else int(base) + int(match["offset"] or 0)
    named = getattr(signal, text if text.startswith("SIG") else f"SIG{text}", None)
    return int(named) if isinstance(named, signal.Signals) else None


def signal_name(value: Any) -> str:
    """Return the canonical name of a catchable signal, such as `SIGTERM` or `SIGRTMAX-3`."""
    return _number_name(signal_number(value))


def _number_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Real-time signals between the two ends have no name of their own.
        return f"SIGRTMAX{number - int(signal.SIGRTMAX)}"


def signal_names(value: Any) -> tuple[str, ...]:
    """Return canonical names, each once, from a list or from text such as `"SIGTERM,SIGUSR2"`."""
    items = ([] if is_nothing(value) else value.split(",")) if isinstance(value, str) else value
    if isinstance(value, int) and not isinstance(value, bool):
        items = [value]
    if not isinstance(items, (list, tuple)):
        raise ValueError('expected signals such as "SIGTERM,SIGUSR2"')
    return tuple(dict.fromkeys(signal_name(item) for item in items))


def section_timeouts(value: Any) -> dict[str, float]:
    """Return seconds by section name from a mapping, or from text such as `"checkpoint:900,eval:10min"`.

    A section given as `null` has the learned deadline, like one that is not listed.
    """
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif is_nothing(value):
        pairs = []
    elif isinstance(value, str):
        pairs = [_split_pair(item) for item in value.split(",")]
    else:
        raise ValueError(_SECTIONS)
    result: dict[str, float] = {}
    for name, timeout in pairs:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(_SECTIONS)
        try:
            seconds = learned_duration(timeout)
        except ValueError as error:
            raise ValueError(f"section {shown(name)}: {error}, not {shown(timeout)}") from None
        if seconds is not None:
            result[name.strip()] = seconds
    return result


_ADDRESSES = "expected sinks with their addresses, such as `incident-log=/var/log/incidents`"


def named_addresses(value: Any) -> dict[str, str] | None:
    """Return addresses by name from a mapping, or from text such as `"incident-log=/var/log/a,other=host:1"`."""
    if is_nothing(value):
        return None
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, str):
        pairs = [(name, address if equals else None) for name, equals, address in map(_at_equals, value.split(","))]
    elif isinstance(value, Mapping):
        pairs = value.items()
    else:
        raise ValueError(_ADDRESSES)
    result: dict[str, str] = {}
    for name, address in pairs:
        if not isinstance(name, str) or not name.strip() or not isinstance(address, str) or not address.strip():
            raise ValueError(_ADDRESSES)
        result[name.strip()] = address.strip()
    return result or None


def _at_equals(item: str) -> tuple[str, str, str]:
    return item.partition("=")


def _split_pair(item: str) -> tuple[str, str]:
    name, colon, timeout = item.rpartition(":")
    if not colon:
        raise ValueError(_SECTIONS)
    return name, timeout


def checkpoint_every(value: Any) -> str | int:
    """Return `"auto"`, a number of steps, or the text of a duration such as `"10min"`."""
    expected = 'expected "auto", a number of steps, or a duration with its unit such as "10min"'
    text = str(value).strip().lower() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if text == "auto" or (text.isdecimal() and int(text) >= 1):
        return text if text == "auto" else int(text)
    try:
        # A bare "2.5" could be steps or seconds: only text with a unit is a duration here.
        if text[-1:].isalpha() and positive_duration(text) > 0:
            return text
    except ValueError:
        pass
    raise ValueError(expected)
