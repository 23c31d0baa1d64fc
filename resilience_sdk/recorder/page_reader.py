"""The monitor's side of a rank page: its words, decoded and distrusted."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import attrs

from resilience_sdk.core.json_records import to_values
from resilience_sdk.core.plain_file import open_plain
from resilience_sdk.recorder import page_layout as at

_NANO = 1e9
_MAX_RANK = 1 << 24
_RETRIES = 8


@attrs.frozen
class OpenSection:
    """A section (or heartbeat) that its rank has entered and not left."""

    name: str
    kind: str
    """`heartbeat`, `compute`, `comm`, `io` or `idle`, or `pulse` for the interval since the last `beat()`."""
    entered_ns: int
    timeout_s: float | None
    """Deadline given as an argument, in seconds."""
    occurrences: int
    """How often the name was completed before on this lane; 0 means that this is the first time."""


@attrs.frozen
class LaneView:
    """One thread of a rank."""

    thread_id: int
    last_ns: int
    beats: int
    step: int | None
    """The step that it is in, from 0 as a loop counts them; between two, and behind the last, the one that it completed
    last, unless it waits for the data of the next. None where steps are not seen."""
    step_is_global: bool
    stack: tuple[OpenSection, ...]
    """Open sections, outermost first."""
    beat_ns: int = 0
    """When its last heartbeat was left, or its last pulse came; 0 before the first."""

    @property
    def section(self) -> str | None:
        """Name of the innermost open section that is not the step itself."""
        return next((one.name for one in reversed(self.stack) if one.kind not in at.BEAT_KINDS), None)

    is_step_broken: bool = False
    """The last step was ended by an exception, so it was not completed."""

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun that is not over."""
        return any(one.kind in at.BEAT_KINDS for one in self.stack)


@attrs.frozen
class AllocatedMemory:
    """The memory of a rank on its device, in bytes."""

    allocated: int
    """What torch's allocator has handed out."""
    peak: int
    total: int
    """What the device has."""


@attrs.frozen
class RankSnapshot:
    """A rank page at one moment; all times are CLOCK_MONOTONIC nanoseconds of its host."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    pid: int
    start_ticks: int
    host: str
    script: str
    created_ns: int
    provisional: bool
    declared: bool
    done: bool
    dumps_stacks: bool
    paused: str | None
    exit_state: str
    beat_source: str
    checks: int
    collectives: int
    first_beat_ns: int | None
    odd_exits: int
    lost: int
    lanes: tuple[LaneView, ...]
    resumed_ns: int | None = None
    """When the last pause ended."""
    learns: bool = True
    """Whether deadlines are to be learned from it."""
    nvrx_words: bool = False
    """Whether the program is written for NVRx, so that its lines stand beside ours."""
    trains: bool = False
    """Whether an optimizer of torch was made; with neither this nor `declared` it may be any program."""
    script_exit_code: int | None = None
    """What the script has left with, once it is over; its process may still be ended otherwise."""
    group_left: bool = False
    """Whether torch's process group was still there then: the script has never destroyed it."""
    over_ns: int | None = None
    """When the script ended and its interpreter began to go down."""
    destroying_ns: int | None = None
    """Since when the main thread has been in torch's `destroy_process_group`."""
    hears: tuple[int, ...] = ()
    """The signals that the SDK's handler takes as a request to leave, by the word of the rank."""
    notice: int = 0
    """The signal that has asked it to leave, or one of NOTICE_NAMES; 0: nobody has."""
    device: AllocatedMemory | None = None
    """Its memory on the device, as it said some seconds ago; None: it uses none."""

    @property
    def is_over(self) -> bool:
        """Whether the script has ended, and no thread that it left behind trains on."""
        return self.over_ns is not None and 0 < self.main_lane.beat_ns <= self.over_ns

    @property
    def main_lane(self) -> LaneView:
        """The lane that beats; else the one that was opened first."""
        return next((lane for lane in self.lanes if lane.beats), self.lanes[0] if self.lanes else _NO_LANE)

    @property
    def step(self) -> int | None:
        """The step that the beating lane is in (see `LaneView`)."""
        return self.main_lane.step

    @property
    def last_step(self) -> int | None:
        """The last step of a loop that has ended: the interval that the last pulse opened is none."""
        lane = self.main_lane
        is_open = any(section.kind == "pulse" for section in lane.stack)
        is_inside = any(section.kind == "heartbeat" for section in lane.stack)
        return lane.step - 1 if lane.step and is_open and not is_inside else lane.step

    @property
    def step_is_global(self) -> bool:
        """Whether `step` counts over attempts; else it counts beats of this attempt only."""
        return self.main_lane.step_is_global

    @property
    def completed_steps(self) -> int | None:
        """How many steps of the training are complete, counted over attempts; None where steps are not numbered.

        This is the one place where a step's number (from 0) becomes an amount.
        """
        lane = self.main_lane
        if lane.step is None or not lane.step_is_global:
            return None
        return lane.step + (not (lane.is_in_step or lane.is_step_broken))

    @property
    def beats(self) -> int:
        """Completed outermost heartbeats of the beating lane."""
        return self.main_lane.beats

    @property
    def completed_beats(self) -> int:
        """Those of them that were left well: a step that an exception has ended is not complete."""
        return self.beats - (self.main_lane.is_step_broken and self.beats > 0)

    @property
    def mean_step_s(self) -> float:
        """The mean time of its steps so far, in seconds; 0 before the second."""
        lane = self.main_lane
        steps, first_ns = lane.beats - 1, self.first_beat_ns
        return 0.0 if steps < 1 or first_ns is None else max(0.0, (lane.beat_ns - first_ns) / steps / _NANO)

    def without_step_s(self, now_ns: int) -> float:
        """Return for how long it has not come on: seconds since its last beat, its last pause, or its start."""
        lane = self.main_lane
        since_ns = max(self.created_ns, lane.beat_ns or lane.last_ns, self.resumed_ns or 0)
        return max(0.0, (now_ns - since_ns) / _NANO)


_NO_LANE = LaneView(thread_id=0, last_ns=0, beats=0, step=None, step_is_global=False, stack=())


def snapshot_to_json(snapshot: RankSnapshot) -> dict[str, object]:
    """Return a snapshot as JSON values, for `pages/rank-N.json` of an incident."""
    return to_values(snapshot) | {"step": snapshot.step, "beats": snapshot.beats}


class LanePasses(NamedTuple):
    """Completed passes of one section on one lane."""

    name: str
    kind: str
    lane: int
    start: int
    """Number of the first of them since the rank began; those before are known, or were overwritten."""
    samples_ns: list[int]
    """One duration per pass."""
    is_joint: bool = False
    """Whether passes of it were seen to hold collectives, so that their time is that of the other ranks too."""
    before: int | None = 0
    """How many of its passes came before the rank's first step was complete; None: that step is still awaited."""
    in_step: bool | None = None
    """Whether the newest pass lay inside of a heartbeat; None where that cannot be told any more."""


def map_page(path: Path, *, writable: bool = False) -> mmap.mmap:
    """Map the page of another process. Raises OSError when it is not a private file of ours, or too small."""
    fd = open_plain(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise PermissionError(1, f"{path} is not a private file of this user")
        if info.st_size < at.PAGE_BYTES:
            raise OSError(22, f"{path} has {info.st_size} bytes, a rank page has {at.PAGE_BYTES}")
        return mmap.mmap(fd, at.PAGE_BYTES, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(fd)


class PageReader:
    """Maps one page file and decodes it; everything in the file is distrusted.

    Raises OSError when the file cannot be opened, is not ours alone, or is too small.
    """

    def __init__(self, path: Path) -> None:
        """Map `path` for reading."""
        self.path = path
        self.garbled = 0
        self._counts: dict[int, int] = {}
        self._names: list[tuple[str, str]] = []
        self._known_facts: dict[str, object] | None = None
        self._rings: list[list[tuple[int, int]]] = [[] for _ in range(at.LANE_SLOTS)]
        self._rings_seen = 0
        self._mapping = map_page(path)
        self._bytes = memoryview(self._mapping)
        self.words: memoryview[int] = self._bytes.cast("Q")

    def close(self) -> None:
        """Unmap the page."""
        self.words.release()
        self._bytes.release()
        self._mapping.close()

    def snapshot(self) -> RankSnapshot | None:
        """Decode the page, or return None (and count it in `garbled`) when it holds no valid one."""
        for _ in range(_RETRIES):
            before = self.words[at.W_SEQUENCE]
            if before % 2 == 0:
                decoded = self._decode()
                if self.words[at.W_SEQUENCE] == before:
                    if decoded is None:
                        self.garbled += 1
                    return decoded
        self.garbled += 1
        return None

    def passes(self) -> list[LanePasses]:
        """Return what was completed since the last call, per ring."""
        q = self.words
        found: list[LanePasses] = []
        has_stepped, awaits_step = q[at.W_STEPPED], self._awaits_step()
        for ring in range(min(q[at.W_RINGS], at.RING_SLOTS)):
            first = at.ring_at(ring)
            count = q[first + at.R_COUNT]
            seen = self._counts.get(ring, 0)
            if count == seen:
                continue
            self._counts[ring] = count
            lane, name_index = divmod(q[first + at.R_NAME_LANE], 1 << 32)
            name = self._name(name_index)
            if name is None or count < seen:
                continue
            # The oldest slot may be overwritten while it is read, so at most 63 of 64 are taken.
            start = max(seen, count - at.RING_SAMPLES + 1)
            samples = [q[first + at.R_SAMPLES + (n & at.RING_MASK)] for n in range(start, count)]
            is_joint = bool(q[at.W_JOINT] >> name_index & 1)
            before = q[at.BEFORE_AT + ring] if has_stepped else None if awaits_step else 0
            found.append(
                LanePasses(name[0], name[1], lane, start, samples, is_joint, before, self._in_step(lane, first))
            )
        return found

    def _in_step(self, lane: int, ring: int) -> bool | None:
        """Tell whether the newest completed pass of a ring lay inside of a heartbeat of its lane."""
        q = self.words
        entered, left = q[ring + at.R_ENTERED_NS], q[ring + at.R_LEFT_NS]
        if entered > left or lane >= at.LANE_SLOTS:
            return None  # another pass has begun: of the one before only the end is known
        for first, name_index in self._rings[lane]:
            name = self._name(name_index)
            if name is not None and name[1] == "heartbeat" and name[0] != at.EVALUATION:
                began, ended = q[first + at.R_ENTERED_NS], q[first + at.R_LEFT_NS]
                if entered >= began:
                    return began > ended or entered < ended
                return False if began > ended and entered >= ended else None
        return None

    def _awaits_step(self) -> bool:
        """Tell whether a first step is to come: the script beats, or has an optimizer. Of others nobody knows."""
        q = self.words
        beats = q[at.W_BEAT_SOURCE] in (at.BEATS_USER, at.BEATS_OPTIMIZER)
        return not q[at.W_STEPPED] and (beats or bool(q[at.W_FLAGS] & at.FLAG_TRAINS))

    def _name(self, index: int) -> tuple[str, str] | None:
        while len(self._names) <= index < min(self.words[at.W_NAMES], at.NAME_SLOTS):
            first = at.name_at(len(self._names))
            kind = self.words[first + at.N_KIND]
            if kind >= len(at.KINDS):
                return None
            self._names.append((self._text((first + at.N_TEXT) * 8, at.NAME_BYTES), at.KINDS[kind]))
        return self._names[index] if 0 <= index < len(self._names) else None

    def _decode(self) -> RankSnapshot | None:
        q = self.words
        rank, size = q[at.W_RANK], q[at.W_WORLD_SIZE]
        pid = q[at.W_PID]
        plausible = (
            q[at.W_MAGIC] == at.MAGIC
            and q[at.W_VERSION] == at.VERSION
            and rank < size <= _MAX_RANK
            and 1 < pid < 1 << 31
            and q[at.W_EXIT_STATE] < len(at.EXIT_NAMES)
            and q[at.W_BEAT_SOURCE] < len(at.BEAT_SOURCES)
        )
        if not plausible:
            return None
        self._name(min(q[at.W_NAMES], at.NAME_SLOTS) - 1)  # read what is new in the table of names
        flags = q[at.W_FLAGS]
        facts = self._facts()
        self._find_rings()
        lanes = tuple(self._lane(index) for index in range(min(q[at.W_LANES], at.LANE_SLOTS)))
        return RankSnapshot(
            rank=rank,
            local_rank=q[at.W_LOCAL_RANK],
            world_size=size,
            attempt=q[at.W_ATTEMPT],
            pid=pid,
            start_ticks=q[at.W_START_TICKS],
            host=str(facts.get("host", "")),
            script=str(facts.get("script", "")),
            created_ns=q[at.W_CREATED_NS],
            provisional=bool(flags & at.FLAG_PROVISIONAL),
            declared=bool(flags & at.FLAG_DECLARED),
            done=bool(flags & at.FLAG_DONE),
            dumps_stacks=bool(flags & at.FLAG_DUMPS),
            paused=self._text(at.PAUSE_TEXT_AT, at.PAUSE_TEXT_BYTES) if q[at.W_PAUSED] else None,
            exit_state=at.EXIT_NAMES[q[at.W_EXIT_STATE]],
            beat_source=at.BEAT_SOURCES[q[at.W_BEAT_SOURCE]],
            checks=q[at.W_CHECKS],
            collectives=q[at.W_COLLECTIVES],
            first_beat_ns=q[at.W_FIRST_BEAT_NS] or None,
            odd_exits=q[at.W_ODD_EXITS],
            lost=q[at.W_LOST],
            lanes=lanes,
            resumed_ns=q[at.W_RESUMED_NS] or None,
            learns=not flags & at.FLAG_KEEPS_TIMEOUTS,
            nvrx_words=bool(flags & at.FLAG_NVRX_WORDS),
            trains=bool(flags & at.FLAG_TRAINS),
            script_exit_code=q[at.W_EXIT_CODE] if self._has_left(q) else None,
            group_left=bool(flags & at.FLAG_GROUP_LEFT),
            over_ns=q[at.W_OVER_NS] or None,
            destroying_ns=q[at.W_DESTROYING_NS] or None,
            hears=tuple(number for number in range(1, 64) if q[at.W_HEARS] >> number & 1),
            notice=q[at.W_NOTICE],
            device=AllocatedMemory(q[at.W_DEVICE_NOW], q[at.W_DEVICE_PEAK], q[at.W_DEVICE_TOTAL])
            if q[at.W_DEVICE_TOTAL]
            else None,
        )

    @staticmethod
    def _has_left(q: memoryview) -> bool:
        is_over = q[at.W_OVER_NS] != 0 and q[at.W_EXIT_STATE] == at.EXIT_RUNNING
        return is_over or q[at.W_EXIT_STATE] == at.EXIT_CLEAN

    def _facts(self) -> dict[str, object]:
        if self._known_facts is None:  # written once, before the magic number
            try:
                facts = json.loads(self._text(at.TEXT_AT, at.TEXT_BYTES))
            except ValueError:
                facts = None
            self._known_facts = facts if isinstance(facts, dict) else {}
        return self._known_facts

    def _find_rings(self) -> None:
        """Read what is new in the table of rings: `(first word, name)` by lane."""
        q = self.words
        rings = min(q[at.W_RINGS], at.RING_SLOTS)
        for ring in range(self._rings_seen, rings):
            first = at.ring_at(ring)
            lane, name_index = divmod(q[first + at.R_NAME_LANE], 1 << 32)
            if lane < at.LANE_SLOTS:
                self._rings[lane].append((first, name_index))
        self._rings_seen = max(rings, self._rings_seen)

    def _lane(self, index: int) -> LaneView:
        q = self.words
        lane = at.lane_at(index)
        beats, step, last_ns, beat_ns, inside = 0, None, 0, 0, False
        last_pass: list[tuple[int, int]] = []
        raised, is_broken = q[lane + at.L_RAISED_NS], False
        open_rings: list[tuple[int, int, int]] = []
        for first, name_index in self._rings[index]:
            name = self._name(name_index)
            if name is None:
                continue
            entered, left, count = q[first + at.R_ENTERED_NS], q[first + at.R_LEFT_NS], q[first + at.R_COUNT]
            last_ns = max(last_ns, left)
            is_open = entered > left
            if is_open:
                open_rings.append((entered, first, name_index))
            if name[1] in at.BEAT_KINDS:
                if name[1] == "pulse":
                    count -= min(count, q[lane + at.L_PULSES_BEFORE])
                beat_ns = max(beat_ns, left)
                if name[0] != at.EVALUATION:
                    beats += count
                    step = max(step or 0, count)
                    inside = inside or is_open
                    is_broken = is_broken or (raised != 0 and raised in (left, at.RAISED_INSIDE))
                if name[1] == "heartbeat":
                    # Behind the ring's words, as its writer stores them before these.
                    if left == q[lane + at.L_PASS_LEFT_NS]:
                        last_pass.append((q[lane + at.L_PASS_ENTERED_NS], left))
                    elif count:
                        took = q[first + at.R_SAMPLES + (count - 1 & at.RING_MASK)]
                        last_pass.append((left - took, left))
        stack = tuple(
            self._open_section(entered, first, name_index)
            for entered, first, name_index in sorted(open_rings)
            # One that was entered within a completed heartbeat was left behind by an exception between two
            # bytecodes, or belongs to a coroutine, whose blocks are not guarded.
            if not any(since <= entered < left for since, left in last_pass)
        )
        if step and not inside and not any(section.name == at.NEXT_STEPS for section in stack):
            step -= 1  # the one that was completed last
        if q[at.W_BEAT_SOURCE] == at.BEATS_COLLECTIVES:
            step = None  # what is counted is how often somebody looked
        explicit = q[lane + at.L_STEP]
        return LaneView(
            thread_id=q[lane + at.L_THREAD],
            last_ns=last_ns,
            beats=beats,
            step=explicit - 1 if explicit else step,
            step_is_global=bool(explicit),
            beat_ns=beat_ns,
            stack=stack,
            is_step_broken=is_broken,
        )

    def _open_section(self, entered: int, first: int, name_index: int) -> OpenSection:
        name, kind = self._names[name_index]
        count = self.words[first + at.R_COUNT]
        timeout_ns = self.words[at.name_at(name_index) + at.N_TIMEOUT_NS]
        return OpenSection(
            name=name,
            kind=kind,
            entered_ns=entered,
            timeout_s=timeout_ns / _NANO if timeout_ns else None,
            # The first pulse opens the first interval, and is counted like every other.
            occurrences=max(0, count - 1) if kind == "pulse" else count,
        )

    def _text(self, offset: int, size: int) -> str:
        return bytes(self._bytes[offset : offset + size]).partition(b"\0")[0].decode(errors="replace")
