"""Timeouts.

How long a step, a section, the time between and the start-up may take, as set or as learned from durations.

Which deadline applies, in this order:

1. a timeout that somebody set: the section's argument, `section_timeouts`, `heartbeat_timeout`,
   `initial_heartbeat_timeout`, `out_of_section_timeout`. It *is* the deadline: neither learned nor floored;
2. for the first occurrence of a name on a rank: learned from the first occurrences of *earlier attempts*,
   else 3600 s. Never from peers of the same attempt: rank 0 evaluates for minutes in a section that the
   others leave at once;
3. learned from completed occurrences;
4. a heartbeat 600 s, the time out of section 1800 s, the start-up 3600 s. A section has none of its own: the
   enclosing heartbeat's applies.

Learned (rule `quantile`) is the largest of

* `safety_factor` x the 0.99 quantile of a sliding window pooled over ranks,
* half of `safety_factor` x the longest occurrence that is remembered: what happened in the
  last 4096 steps may happen again, and somewhat slower, but after that it is forgotten,
* half of `safety_factor` x the longest time after which something that was past its deadline went on,
* `timeout_floor`; ten times that for time that nobody named (out of section, between two pulses, start-up,
  first occurrences), because an evaluation, an export or a resume may hide in it that was never seen before.

Rule `nvrx` is `safety_factor` x maximum of the attempt, averaged half and half with the value that earlier
attempts ended with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from resilience_sdk.core.settings import Settings
    from resilience_sdk.recorder.page_reader import OpenSection, RankSnapshot

WINDOW = 2048
"""Durations, pooled over ranks, that the quantile is taken of."""
BLOCK = 128
BLOCKS = 32
REMEMBERED = BLOCK * BLOCKS
"""How many occurrences *per rank* a peak is remembered."""
_STORED = 128


class Samples:
    """Durations of one name, in seconds.

    Two memories, because two things are legitimate. The window forgets quickly and its high quantile does not
    feel a single outlier. The peaks are block maxima over REMEMBERED occurrences per rank: a checkpoint every
    1000 steps inside a section is rarer than one in a hundred, so no quantile shows it, and it must not be
    called a hang; nor may one bad day inflate a deadline for ever, so a block is dropped when it is old.
    """

    def __init__(self, pool: int = 1) -> None:
        """`pool` is the number of ranks whose durations are added here."""
        self._block_size = BLOCK * max(1, pool)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._sorted: list[float] | None = []  # None: to be made when somebody asks
        self._peaks: deque[float] = deque(maxlen=BLOCKS)
        self._block_left = 0
        self.added = 0

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, duration_s: float) -> None:
        """Add one duration; what is no duration (negative, not finite) is ignored."""
        self.extend((duration_s,))

    def extend(self, durations_s: Iterable[float]) -> None:
        """Add durations in their order; a monitor of many ranks adds thousands a second."""
        fresh = [duration for duration in durations_s if 0.0 <= duration < math.inf]
        if not fresh:
            return
        self.added += len(fresh)
        self._recent.extend(fresh)
        self._sorted = None
        while fresh:
            if not self._block_left:
                self._block_left = self._block_size
                self._peaks.append(0.0)
            here, fresh = fresh[: self._block_left], fresh[self._block_left :]
            self._block_left -= len(here)
            self._peaks[-1] = max(self._peaks[-1], max(here))

    def quantile(self, q: float) -> float:
        """Return the nearest-rank quantile of the window: the maximum while there are few. Needs a sample."""
        ordered = self._in_order()
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    def peak(self) -> float:
        """Return the longest duration that is still remembered. Needs a sample."""
        return max(self._peaks)

    def to_json(self) -> dict[str, Any]:
        """Return a digest: evenly spaced order statistics of the window with its maximum, and the peaks."""
        ordered = self._in_order()
        last = len(ordered) - 1
        count = min(_STORED, len(ordered))
        step = last / (count - 1) if count > 1 else 0.0
        return {
            "window": [_rounded(ordered[round(step * n)]) for n in range(count)],
            "peaks": [_rounded(peak) for peak in self._peaks],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Add what `to_json` described; anything misshapen in it is skipped."""
        self.extend(numbers(data.get("window")))
        self._peaks.extend(numbers(data.get("peaks")))
        self._block_left = 0
        self.added = 0

    def _in_order(self) -> list[float]:
        if self._sorted is None:
            self._sorted = sorted(self._recent)
        return self._sorted


def numbers(value: Any) -> Iterable[float]:
    """Yield the durations in a list of JSON values, at most WINDOW of them; the rest is skipped."""
    if not isinstance(value, list):
        return
    for item in value[:WINDOW]:
        # Also refuses integers that are too large for a float, which JSON may hold.
        if isinstance(item, (int, float)) and not isinstance(item, bool) and 0 <= item < 1e12:
            yield float(item)


def _rounded(duration_s: float) -> float:
    return float(f"{duration_s:.6g}")


_ATTEMPTS = 32  # attempts whose first occurrences are remembered
_MAX_DOUBLINGS = 4
_FRESH_PARTS = 8
_ALWAYS_FRESH = 256


class Entry:
    """Durations of one name, in seconds: of first occurrences, of all others, and what was known before."""

    def __init__(self, pool: int) -> None:
        """`pool` is the number of ranks whose durations are added."""
        self._pool = pool
        self.samples = Samples(pool)
        self.firsts: deque[float] = deque(maxlen=_ATTEMPTS)
        """The slowest first occurrence of each earlier attempt."""
        self.prior: float | None = None
        """A deadline that was learned under other conditions."""
        self.doublings = 0
        self.survived_s = 0.0
        """The longest time that was past a deadline and then went on."""
        self._survived_until = 0
        self._median = (-1, 0.0)  # (samples added by then, value)
        self._quantile = (0, -1.0, 0.0)  # (samples added by then, q, value)
        self._doubled_until = 0
        self._first_now: float | None = None  # the slowest of this attempt
        self._attempt_max: float | None = None
        self._old_value: float | None = None  # rule nvrx: what earlier attempts ended with

    def add_first(self, duration_s: float) -> None:
        """Add a first occurrence; it counts from the next attempt on."""
        self._first_now = max(duration_s, self._first_now or 0.0)

    def extend(self, durations_s: Sequence[float]) -> None:
        """Add occurrences that are not first ones."""
        if not durations_s:
            return
        self.samples.extend(durations_s)
        self._attempt_max = max(max(durations_s), self._attempt_max or 0.0)
        if self.doublings and self.samples.added >= self._doubled_until:
            self.doublings = 0  # a long time of normal work: the doubt is over
        if self.survived_s and self.samples.added >= self._survived_until:
            self.survived_s = 0.0

    def quantile(self, q: float) -> float:
        """Return a quantile of the window; in a full one it is taken again only when an eighth of it is new.

        A longer duration than any before shows at once by `samples.peak()`. Needs a sample.
        """
        at, known, value = self._quantile
        stale = self.samples.added - at > len(self.samples) // _FRESH_PARTS
        if known != q or stale or len(self.samples) < _ALWAYS_FRESH:
            value = self.samples.quantile(q)
            self._quantile = (self.samples.added, q, value)
        return value

    def median(self) -> float:
        """Return the median of the window, taken again as seldom as the quantile. Needs a sample."""
        at, value = self._median
        if at < 0 or self.samples.added - at > len(self.samples) // _FRESH_PARTS:
            value = self.samples.quantile(0.5)
            self._median = (self.samples.added, value)
        return value

    def survive(self, elapsed_s: float) -> None:
        """Note a time that was past its deadline and went on; as old as a remembered peak, it is forgotten."""
        self.survived_s = max(self.survived_s, elapsed_s)
        self._survived_until = self.samples.added + REMEMBERED * self._pool

    def double(self) -> None:
        """Doubt the deadline: it fired and nothing was found."""
        self.doublings = min(self.doublings + 1, _MAX_DOUBLINGS)
        self._doubled_until = self.samples.added + REMEMBERED * self._pool

    def begin_attempt(self, factor: float) -> None:
        """Close what the last attempt taught."""
        if self._first_now is not None:
            self.firsts.append(self._first_now)
        self._first_now = None
        if self._attempt_max is not None:
            self._old_value = self.nvrx_value(factor)
        self._attempt_max = None

    def nvrx_value(self, factor: float) -> float | None:
        """Return NVRx's deadline: `factor` x maximum, averaged with what earlier attempts ended with."""
        if self._attempt_max is None:
            return self._old_value
        new = factor * self._attempt_max
        return new if self._old_value is None else 0.5 * new + 0.5 * self._old_value

    def demote(self, scale: float, deadline_s: float | None) -> None:
        """Make a mere prior of what was restored: the deadline that it gave, `scale` times."""
        self.samples = Samples(self._pool)
        self._quantile = (0, -1.0, 0.0)
        self._median = (-1, 0.0)
        self.survived_s *= scale
        self.prior = None if deadline_s is None else deadline_s * scale
        self.firsts = deque((first * scale for first in self.firsts), maxlen=_ATTEMPTS)
        self._old_value = None if self._old_value is None else self._old_value * scale

    def to_json(self, factor: float) -> dict[str, Any]:
        """Return the entry as JSON values."""
        first_now = [] if self._first_now is None else [self._first_now]
        return {
            **self.samples.to_json(),
            "firsts": [*self.firsts, *first_now],
            "first_now": bool(first_now),
            "value": self.nvrx_value(factor),
            "doublings": self.doublings,
            "survived": self.survived_s,
        }

    def restore(self, data: Mapping[str, Any], *, is_same_attempt: bool = False) -> None:
        """Take what `to_json` described into an empty entry; anything misshapen is skipped.

        `is_same_attempt`: it was told in the attempt that goes on, whose first occurrences do not count yet.
        """
        self.samples.restore(data)
        self.firsts.extend(numbers(data.get("firsts")))
        if is_same_attempt and self.firsts and data.get("first_now") is True:
            self.add_first(self.firsts.pop())
        self._old_value = next(iter(numbers([data.get("value")])), None)
        for survived_s in numbers([data.get("survived")]):
            if survived_s:
                self.survive(survived_s)
        doublings = data.get("doublings")
        if isinstance(doublings, int) and doublings > 0:
            self.doublings = min(doublings, _MAX_DOUBLINGS)
            self._doubled_until = REMEMBERED * self._pool


OUT_OF_SECTION = "out of section"
STARTUP = "start-up"
QUANTILE = 0.99
FALLBACK_INITIAL_S = 3600.0
FALLBACK_HEARTBEAT_S = 600.0
FALLBACK_OUT_OF_SECTION_S = 1800.0
UNNAMED_FLOORS = 10
"""Learned deadlines of unnamed time are at least this many times `timeout_floor`."""

_PRIOR_SCALE = 2.0  # what was learned under other conditions is doubled
_TRUSTED_OVER_PRIOR = 32  # own durations, after which such a prior is dropped
_STARTUPS_NEEDED = 2  # an attempt that resumes starts slower than the fresh one before it
_MAX_JOBS = 8
_MAX_ENTRIES = 256
_BEATS = ("heartbeat", "pulse")


@attrs.frozen
class Limit:
    """One deadline, in seconds, and why it is that."""

    seconds: float
    source: str
    """`set` by somebody, `first` occurrence, `learned`, or `default`."""
    setting: str = attrs.field(default="", eq=False)
    """The setting or argument that it comes from, where somebody set it; also of a first occurrence."""

    @property
    def is_set(self) -> bool:
        """Whether somebody set it, so that it is to be taken literally."""
        return self.source == "set"


class LearnedTimeouts:
    """Learns durations and answers with deadlines. Never fails for lack of samples; not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        prior: Mapping[str, Any] | None = None,
        *,
        script: str = "",
        world_size: int = 1,
        pool: int = 1,
        is_same_attempt: bool = False,
    ) -> None:
        """Begin with what `prior`, the content of `timeouts.json`, says of this script and world size.

        `pool` is the number of ranks whose durations will be added. A prior of other conditions counts
        doubled, and only until there are durations of this run; garbage in it is ignored. `is_same_attempt`: it was
        written in the attempt that goes on.
        """
        self._settings = settings
        self._script = script
        self._world_size = world_size
        self._pool = max(1, pool)
        self._learns = True
        self._entries: dict[str, Entry] = {}
        self._other_jobs: list[Mapping[str, Any]] = []
        if prior is not None:
            self._load(prior, is_same_attempt)

    @classmethod
    def from_json(
        cls,
        data: object,
        settings: Settings,
        *,
        script: str = "",
        world_size: int = 1,
        pool: int = 1,
        is_same_attempt: bool = False,
    ) -> LearnedTimeouts:
        """Return a book that begins with `data`, whatever was read from `timeouts.json`."""
        prior = data if isinstance(data, Mapping) else None
        facts: dict[str, Any] = {"script": script, "world_size": world_size, "pool": pool}
        return cls(settings, prior, **facts, is_same_attempt=is_same_attempt)

    # -- learning

    def keep(self) -> None:
        """Learn nothing from now on, and forget what was: what is set holds, else the defaults."""
        self._learns = False
        self._entries.clear()

    @property
    def learns(self) -> bool:
        """Whether durations are learned."""
        return self._learns

    def begin_attempt(self) -> None:
        """Let what the last attempt taught about first occurrences and start-up count from now on."""
        for entry in self._entries.values():
            entry.begin_attempt(self._settings.safety_factor)

    def add(self, name: str, kind: str, durations_s: Iterable[float], first: bool = False) -> None:
        """Add completed durations of a section or heartbeat.

        With `first`, the first of them is the first occurrence of the name on its rank: it holds compilation
        and warm-up, and is learned apart.
        """
        if not self._learns:
            return
        entry = self._entry(_key(name, kind))
        durations = list(durations_s)
        if first and durations:
            entry.add_first(durations.pop(0))
        entry.extend(durations)

    def add_out_of_section(self, durations_s: Iterable[float]) -> None:
        """Add lengths of completed intervals in which a rank had nothing open."""
        if self._learns:
            self._entry(OUT_OF_SECTION).extend(list(durations_s))

    def add_startup(self, duration_s: float) -> None:
        """Add the time from a rank's start to its first beat."""
        if self._learns:
            self._entry(STARTUP).add_first(duration_s)

    def double(self, name: str) -> float | None:
        """Double the deadline of a name that fired without a conclusive culprit, and return the new one.

        `name` may be OUT_OF_SECTION or STARTUP. A deadline that somebody set stays: then the answer is None.
        The doubt ends after a long time of normal work.
        """
        if not self._learns:
            return None
        keys = [key for key in _keys_of(name) if key in self._entries] or _keys_of(name)[:1]
        answers: list[float] = []
        for key in keys:
            limit = self._steady(key)
            if limit is not None and not limit.is_set:
                self._entry(key).double()
                doubled = self._steady(key)
                answers += [doubled.seconds] if doubled is not None else []
        return max(answers, default=None)

    def survive(self, name: str, kind: str, elapsed_s: float) -> None:
        """Learn at once that something was past its deadline and went on, after `elapsed_s` seconds.

        It only raises the deadline, and counts on all ranks, first occurrences included, and in later attempts.
        """
        if self._learns:
            self._entry(name if name in (OUT_OF_SECTION, STARTUP) else _key(name, kind)).survive(elapsed_s)

    # -- answers

    def usual_step_s(self, name: str | None = None) -> float:
        """Return the usual length of a step, its median in seconds; 0 before the first.

        Without the name of a heartbeat it is that of the shortest kind: an epoch may beat around its steps.
        """
        beats = {key: entry for key, entry in self._entries.items() if key.startswith("heartbeat:")}
        medians = {key: entry.median() for key, entry in beats.items() if len(entry.samples)}
        known = medians.get(_key(name, "heartbeat")) if name is not None else None
        return known if known is not None else min(medians.values(), default=0.0)

    def limit(self, section: OpenSection) -> Limit | None:
        """Return the deadline of an open section with its source; None when it has none of its own."""
        if section.timeout_s is not None:
            return Limit(section.timeout_s, "set", f"timeout={section.timeout_s:g} of the block")
        own = self._settings.section_timeouts.get(section.name)
        if own is not None:
            return Limit(own, "set", f"section_timeouts {section.name}:{own:g}")
        if section.occurrences == 0:
            return self._first(_key(section.name, section.kind))
        return self._steady(_key(section.name, section.kind), unnamed=section.kind == "pulse")

    def deadline(self, section: OpenSection) -> float | None:
        """Return the deadline of an open section in seconds since it was entered; None when it has none."""
        limit = self.limit(section)
        return None if limit is None else limit.seconds

    def step_limit(self, name: str = "step") -> Limit:
        """Return the deadline of a heartbeat after its first."""
        own = self._settings.section_timeouts.get(name)
        setting = f"section_timeouts {name}:{own}"
        limit = Limit(own, "set", setting) if own is not None else self._steady(_key(name, "heartbeat"))
        assert limit is not None
        return limit

    def startup_limit(self) -> Limit:
        """Return the deadline of the time from a rank's start to its first heartbeat."""
        limit = self._steady(STARTUP)
        assert limit is not None
        return limit

    def out_of_section_limit(self) -> Limit:
        """Return the deadline of the time in which nothing is open."""
        limit = self._steady(OUT_OF_SECTION)
        assert limit is not None
        return limit

    def for_slow_work(self, work: str) -> float:
        """Return how long a rank may be seen at known slow work (`compile`, `checkpoint`, `import`), in seconds.

        It overrules learned deadlines only: a compilation in the middle of a run resembles nothing before.
        """
        if work == "compile":
            return self._settings.initial_heartbeat_timeout or FALLBACK_INITIAL_S
        return FALLBACK_HEARTBEAT_S

    # -- persistence

    def to_json(self) -> dict[str, Any]:
        """Return the content of `timeouts.json`: this job first, then what it held of others."""
        factor = self._settings.safety_factor
        entries = {key: entry.to_json(factor) for key, entry in list(self._entries.items())[:_MAX_ENTRIES]}
        job = {"script": self._script, "world_size": self._world_size, "learns": self._learns, "entries": entries}
        return {"version": 1, "jobs": [job, *self._other_jobs][:_MAX_JOBS]}

    def _load(self, prior: Mapping[str, Any], is_same_attempt: bool) -> None:
        jobs = prior.get("jobs")
        jobs = [job for job in jobs if isinstance(job, Mapping)] if isinstance(jobs, list) else []
        same = [job for job in jobs if self._is_this(job)]
        self._other_jobs = [job for job in jobs if not self._is_this(job)][: _MAX_JOBS - 1]
        if same:
            self._restore(same[0], scale=None, is_same_attempt=is_same_attempt)
        for job in sorted(self._other_jobs, key=lambda job: job.get("script") != self._script):
            self._restore(job, scale=_PRIOR_SCALE)

    def _is_this(self, job: Mapping[str, Any]) -> bool:
        return job.get("script") == self._script and job.get("world_size") == self._world_size

    def _restore(self, job: Mapping[str, Any], scale: float | None, is_same_attempt: bool = False) -> None:
        """Take the entries of one job that are not known yet; `scale` makes a mere prior of them."""
        entries = job.get("entries")
        if not isinstance(entries, Mapping):
            return
        for key, data in list(entries.items())[:_MAX_ENTRIES]:
            if not isinstance(key, str) or not isinstance(data, Mapping) or key in self._entries:
                continue
            entry = Entry(self._pool)
            entry.restore(data, is_same_attempt=is_same_attempt)
            if scale is not None:
                entry.demote(scale, self._learned(entry, key == OUT_OF_SECTION))
            self._entries[key] = entry

    # -- rules

    def _entry(self, key: str) -> Entry:
        if key not in self._entries:
            self._entries[key] = Entry(self._pool)
        return self._entries[key]

    def _first(self, key: str) -> Limit:
        """Return the deadline of a first occurrence."""
        explicit = self._settings.initial_heartbeat_timeout
        if explicit is not None:
            # Not "set": it is nobody's own deadline, and protects what happens in it.
            return Limit(explicit, "first", f"initial_heartbeat_timeout {explicit:g}")
        entry = self._entries.get(key)
        if entry is None or not entry.firsts:
            return Limit(FALLBACK_INITIAL_S, "first")
        seconds = self._settings.safety_factor * max(entry.firsts)
        steady = self._learned(entry, unnamed=True) or 0.0
        return Limit(max(self._floor(unnamed=True), seconds, steady) * 2**entry.doublings, "first")

    def _steady(self, key: str, unnamed: bool = False) -> Limit | None:
        """Return the deadline of an occurrence that is not the first."""
        entry = self._entries.get(key)
        boost = 2.0 ** (entry.doublings if entry is not None else 0)
        setting, default = _SETTINGS.get(key.partition(":")[0], ("", None))
        explicit = getattr(self._settings, setting) if setting else None
        if explicit is not None:
            return Limit(explicit, "set", f"{setting} {explicit:g}")
        if key == STARTUP:
            learned = self._learned_startup(entry)
        else:
            learned = self._learned(entry, unnamed or key == OUT_OF_SECTION) if entry is not None else None
        if learned is not None:
            return Limit(learned * boost, "learned")
        return None if default is None else Limit(default * boost, "default")

    def _learned(self, entry: Entry, unnamed: bool) -> float | None:
        """Return what the durations of an entry say, floored; None without any."""
        if self._settings.deadline_rule == "nvrx":
            value = entry.nvrx_value(self._settings.safety_factor)
        else:
            value = self._quantile_value(entry, self._floor(unnamed))
        if entry.prior is not None and entry.samples.added < _TRUSTED_OVER_PRIOR:
            value = max(entry.prior, value or 0.0)
        if entry.survived_s:
            value = max(value or 0.0, max(1.0, self._settings.safety_factor / 2) * entry.survived_s)
        return None if value is None else max(value, self._floor(unnamed))

    def _quantile_value(self, entry: Entry, floor_s: float) -> float | None:
        if not len(entry.samples):
            return None
        factor = self._settings.safety_factor
        peak = entry.samples.peak()
        if max(1.0, factor) * peak <= floor_s:
            # No quantile is above the peak. To sort the window of a fast loop at each look was a third of the
            # monitor's work.
            return floor_s
        return max(factor * entry.quantile(QUANTILE), max(1.0, factor / 2) * peak)

    def _learned_startup(self, entry: Entry | None) -> float | None:
        if entry is None:
            return None
        enough = 1 if self._settings.deadline_rule == "nvrx" else _STARTUPS_NEEDED
        if len(entry.firsts) < enough:
            return None
        return max(self._settings.safety_factor * max(entry.firsts), self._floor(unnamed=True))

    def _floor(self, unnamed: bool) -> float:
        return self._settings.timeout_floor * (UNNAMED_FLOORS if unnamed else 1)


# The timeout that somebody may set for a kind of time, and the one that holds before anything is learned.
_SETTINGS = {
    OUT_OF_SECTION: ("out_of_section_timeout", FALLBACK_OUT_OF_SECTION_S),
    STARTUP: ("initial_heartbeat_timeout", FALLBACK_INITIAL_S),
    "heartbeat": ("heartbeat_timeout", FALLBACK_HEARTBEAT_S),
}


def _key(name: str, kind: str) -> str:
    """Return the key of a name: a heartbeat and a section of one name are two things."""
    return f"heartbeat:{name}" if kind in _BEATS else f"section:{name}"


def _keys_of(name: str) -> tuple[str, ...]:
    if name in (OUT_OF_SECTION, STARTUP):
        return (name,)
    return (_key(name, "heartbeat"), _key(name, "compute"))


_NANO = 1e9


class GapWatch:
    """Watches one rank and yields its completed out-of-section intervals.

    A page tells when its lane last left a block and when the open ones were entered, so a gap is exact when a
    poll falls into the block after it, and else short by at most one poll. Gaps between two polls are missed;
    they are shorter than any deadline.
    """

    def __init__(self) -> None:
        self._began_ns: int | None = None
        self._seen_s = 0.0

    def look(self, snapshot: RankSnapshot, now_ns: int) -> list[float]:
        """Return the gaps, in seconds, that ended since the last look; start-up and pauses do not count."""
        lane = snapshot.main_lane
        counts = snapshot.beats > 0 and not snapshot.done and snapshot.paused is None
        if not counts or lane.last_ns <= 0:
            self._began_ns = None
            return []
        ended: list[float] = []
        began = self._began_ns
        if lane.stack:
            entered = lane.stack[0].entered_ns
            if lane.last_ns <= entered and lane.last_ns == began:
                ended.append((entered - began) / _NANO)
            elif began is not None:
                ended.append(self._seen_s)
            self._began_ns = None
        else:
            if began is not None and began != lane.last_ns:
                ended.append(self._seen_s)
            self._began_ns = lane.last_ns
            self._seen_s = max(0.0, (now_ns - lane.last_ns) / _NANO)
        return ended
