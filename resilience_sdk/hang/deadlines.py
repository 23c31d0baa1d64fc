"""How long a step, a section, the time between and the start-up may take.

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
* half of `safety_factor` x the longest occurrence that is remembered (see `samples`): what happened in the
  last 4096 steps may happen again, and somewhat slower, but after that it is forgotten,
* `timeout_floor`; ten times that for time that nobody named (out of section, between two pulses, start-up,
  first occurrences), because an evaluation, an export or a resume may hide in it that was never seen before.

Rule `nvrx` is `safety_factor` x maximum of the attempt, averaged half and half with the value that earlier
attempts ended with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.hang.entries import Entry

if TYPE_CHECKING:
    from resilience_sdk.rank_page import OpenSection
    from resilience_sdk.settings import Settings

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

    @property
    def is_set(self) -> bool:
        """Whether somebody set it, so that it is to be taken literally."""
        return self.source == "set"


class DeadlineBook:
    """Learns durations and answers with deadlines. Never fails for lack of samples; not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        prior: Mapping[str, Any] | None = None,
        *,
        script: str = "",
        world_size: int = 1,
        pool: int = 1,
    ) -> None:
        """Begin with what `prior`, the content of `timeouts.json`, says of this script and world size.

        `pool` is the number of ranks whose durations will be added. A prior of other conditions counts
        doubled, and only until there are durations of this run; garbage in it is ignored.
        """
        self._settings = settings
        self._script = script
        self._world_size = world_size
        self._pool = max(1, pool)
        self._entries: dict[str, Entry] = {}
        self._other_jobs: list[Mapping[str, Any]] = []
        if prior is not None:
            self._load(prior)

    @classmethod
    def from_json(
        cls, data: object, settings: Settings, *, script: str = "", world_size: int = 1, pool: int = 1
    ) -> DeadlineBook:
        """Return a book that begins with `data`, whatever was read from `timeouts.json`."""
        prior = data if isinstance(data, Mapping) else None
        return cls(settings, prior, script=script, world_size=world_size, pool=pool)

    # -- learning

    def begin_attempt(self) -> None:
        """Let what the last attempt taught about first occurrences and start-up count from now on."""
        for entry in self._entries.values():
            entry.begin_attempt(self._settings.safety_factor)

    def add(self, name: str, kind: str, durations_s: Iterable[float], first: bool = False) -> None:
        """Add completed durations of a section or heartbeat.

        With `first`, the first of them is the first occurrence of the name on its rank: it holds compilation
        and warm-up, and is learned apart.
        """
        entry = self._entry(_key(name, kind))
        durations = list(durations_s)
        if first and durations:
            entry.add_first(durations.pop(0))
        entry.extend(durations)

    def add_out_of_section(self, durations_s: Iterable[float]) -> None:
        """Add lengths of completed intervals in which a rank had nothing open."""
        self._entry(OUT_OF_SECTION).extend(list(durations_s))

    def add_startup(self, duration_s: float) -> None:
        """Add the time from a rank's start to its first beat."""
        self._entry(STARTUP).add_first(duration_s)

    def double(self, name: str) -> float | None:
        """Double the deadline of a name that fired without a conclusive culprit, and return the new one.

        `name` may be OUT_OF_SECTION or STARTUP. A deadline that somebody set stays: then the answer is None.
        The doubt ends after a long time of normal work.
        """
        keys = [key for key in _keys_of(name) if key in self._entries] or _keys_of(name)[:1]
        answers: list[float] = []
        for key in keys:
            limit = self._steady(key)
            if limit is not None and not limit.is_set:
                self._entry(key).double()
                doubled = self._steady(key)
                answers += [doubled.seconds] if doubled is not None else []
        return max(answers, default=None)

    # -- answers

    def limit(self, section: OpenSection) -> Limit | None:
        """Return the deadline of an open section with its source; None when it has none of its own."""
        own = section.timeout_s
        if own is None:
            own = self._settings.section_timeouts.get(section.name)
        if own is not None:
            return Limit(own, "set")
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
        limit = Limit(own, "set") if own is not None else self._steady(_key(name, "heartbeat"))
        assert limit is not None
        return limit

    def for_step(self, name: str = "step") -> float:
        """Return the deadline of a heartbeat after its first, in seconds."""
        return self.step_limit(name).seconds

    def startup_limit(self) -> Limit:
        """Return the deadline of the time from a rank's start to its first heartbeat."""
        limit = self._steady(STARTUP)
        assert limit is not None
        return limit

    def for_startup(self) -> float:
        """Return the deadline of the start-up, in seconds."""
        return self.startup_limit().seconds

    def out_of_section_limit(self) -> Limit:
        """Return the deadline of the time in which nothing is open."""
        limit = self._steady(OUT_OF_SECTION)
        assert limit is not None
        return limit

    def out_of_section(self) -> float:
        """Return the deadline of the time in which nothing is open, in seconds."""
        return self.out_of_section_limit().seconds

    def for_activity(self, activity: str) -> float:
        """Return how long a rank may be seen at known slow work (`compile`, `checkpoint`, `import`), in seconds.

        It overrules learned deadlines only: a compilation in the middle of a run resembles nothing before.
        """
        if activity == "compile":
            return self._settings.initial_heartbeat_timeout or FALLBACK_INITIAL_S
        return FALLBACK_HEARTBEAT_S

    # -- persistence

    def to_json(self) -> dict[str, Any]:
        """Return the content of `timeouts.json`: this job first, then what it held of others."""
        factor = self._settings.safety_factor
        entries = {key: entry.to_json(factor) for key, entry in list(self._entries.items())[:_MAX_ENTRIES]}
        job = {"script": self._script, "world_size": self._world_size, "entries": entries}
        return {"version": 1, "jobs": [job, *self._other_jobs][:_MAX_JOBS]}

    def _load(self, prior: Mapping[str, Any]) -> None:
        jobs = prior.get("jobs")
        jobs = [job for job in jobs if isinstance(job, Mapping)] if isinstance(jobs, list) else []
        same = [job for job in jobs if self._is_this(job)]
        self._other_jobs = [job for job in jobs if not self._is_this(job)][: _MAX_JOBS - 1]
        if same:
            self._restore(same[0], scale=None)
        for job in sorted(self._other_jobs, key=lambda job: job.get("script") != self._script):
            self._restore(job, scale=_PRIOR_SCALE)

    def _is_this(self, job: Mapping[str, Any]) -> bool:
        return job.get("script") == self._script and job.get("world_size") == self._world_size

    def _restore(self, job: Mapping[str, Any], scale: float | None) -> None:
        """Take the entries of one job that are not known yet; `scale` makes a mere prior of them."""
        entries = job.get("entries")
        if not isinstance(entries, Mapping):
            return
        for key, data in list(entries.items())[:_MAX_ENTRIES]:
            if not isinstance(key, str) or not isinstance(data, Mapping) or key in self._entries:
                continue
            entry = Entry(self._pool)
            entry.restore(data)
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
            return Limit(explicit, "first")
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
        explicit, default = self._set_and_default(key)
        if explicit is not None:
            return Limit(explicit, "set")
        if key == STARTUP:
            learned = self._learned_startup(entry)
        else:
            learned = self._learned(entry, unnamed or key == OUT_OF_SECTION) if entry is not None else None
        if learned is not None:
            return Limit(learned * boost, "learned")
        return None if default is None else Limit(default * boost, "default")

    def _set_and_default(self, key: str) -> tuple[float | None, float | None]:
        """Return the timeout that somebody set, and the one that holds before anything is learned."""
        settings = self._settings
        if key == OUT_OF_SECTION:
            return settings.out_of_section_timeout, FALLBACK_OUT_OF_SECTION_S
        if key == STARTUP:
            return settings.initial_heartbeat_timeout, FALLBACK_INITIAL_S
        if key.startswith("heartbeat:"):
            return settings.heartbeat_timeout, FALLBACK_HEARTBEAT_S
        return None, None

    def _learned(self, entry: Entry, unnamed: bool) -> float | None:
        """Return what the durations of an entry say, floored; None without any."""
        if self._settings.deadline_rule == "nvrx":
            value = entry.nvrx_value(self._settings.safety_factor)
        else:
            value = self._quantile_value(entry, self._floor(unnamed))
        if entry.prior is not None and entry.samples.added < _TRUSTED_OVER_PRIOR:
            value = max(entry.prior, value or 0.0)
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


def _key(name: str, kind: str) -> str:
    """Return the key of a name: a heartbeat and a section of one name are two things."""
    return f"heartbeat:{name}" if kind in _BEATS else f"section:{name}"


def _keys_of(name: str) -> tuple[str, ...]:
    if name in (OUT_OF_SECTION, STARTUP):
        return (name,)
    return (_key(name, "heartbeat"), _key(name, "compute"))
