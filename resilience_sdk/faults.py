"""Deterministic faults: the same rank freezes, dies, slows down or is preempted at the same step, every time.

    RESILIENCE_FAULT="hang:rank=1,step=40"                     no code at all
    RESILIENCE_FAULT="kill:rank=0,step=9;slow:rank=2,seconds=.1"     several
    resilience_sdk.faults.inject("hang", rank=1, step=40, how="gil")

The recording blocks call `reached()` and `left()`, and only where `armed()` said so: a process without a
fault never comes here. A fault is real: the process is blocked in C, stopped, or gone, and whatever notices
and repairs that cannot tell it from an accident. Only the journal has a line of it, from before it strikes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk import torch_saves
from resilience_sdk.core import console
from resilience_sdk.errors import ConfigError

if TYPE_CHECKING:
    import subprocess

__all__ = ["InjectedError", "Plan", "armed", "inject", "parse"]

# The ways of each kind, the default first.
_WAYS: Mapping[str, tuple[str, ...]] = {
    "hang": ("sleep", "c", "gil", "stop"),
    "kill": ("sigkill", "segv", "abort", "exit", "exception"),
    "slow": (),
    "preempt": (),
    "pause": (),
    "nan": (),
    "disk-full": (),
    "corrupt-checkpoint": (),
    "monitor-kill": (),
}
_OWN = {
    "hang": ("how",),
    "kill": ("how", "code"),
    "slow": ("seconds",),
    "preempt": ("to",),
    "pause": ("seconds",),
}
# Short words for a kind and its way.
_SHORT = {"hang-gil": ("hang", "gil"), "exit": ("kill", "exit"), "exception": ("kill", "exception")}
_NEEDS_SECONDS = {"slow": "the time it adds to each step", "pause": "how long the rank is stopped"}
_SIGNALLED = ("rank", "job")
_PLACES = ("inside", "outside", "start", "save")
_WHERE = {"save": "inside"}  # from then on it waits for a save
_COMMON = ("rank", "step", "attempt", "section", "where")
_DEFAULT_BEAT = "step"
_LONG_S = 1e6
_ASK_EVERY_S = 0.1


class InjectedError(RuntimeError):
    """The exception of `kill` with `how=exception`; its message depends on the plan alone."""


@attrs.frozen
class Plan:
    """One fault: what happens, and when. None means any."""

    kind: str
    how: str | None = None
    rank: int | None = None
    step: int | None = None
    attempt: int | None = 0
    section: str | None = None
    where: str = "inside"
    seconds: float | None = None
    code: int = 1
    to: str = "rank"

    def __str__(self) -> str:
        """Return the plan in the notation of `RESILIENCE_FAULT`."""
        options = []
        for field in attrs.fields(Plan)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                options.append(f"{field.name}={'any' if value is None else value}")
        return self.kind + (":" + ",".join(options) if options else "")

    @property
    def lasts(self) -> bool:
        """Tell whether it strikes again and again; all others strike once."""
        return self.kind == "slow"

    def concerns(self, rank: int | None, attempt: int) -> bool:
        """Tell whether this process is meant."""
        return self.rank in (None, rank) and self.attempt in (None, attempt)

    def due(self, where: str, name: str, step: int, is_beat: bool) -> bool:
        """Tell whether this is the moment: a place, the name of a block, and the step it belongs to."""
        if where != _WHERE.get(self.where, self.where) or not (
            is_beat if self.section is None else name == self.section
        ):
            return False
        if self.step is None or step == self.step:
            return True
        return self.lasts and step > self.step

    def strike(self) -> None:
        """Do it. Returns only from what a process survives: `slow`, a signal that is handled, a stop that has ended."""
        _STRIKES[self.kind](self)


class Injector:
    """The plans of one process, and which of them have struck."""

    def __init__(self) -> None:
        """Know no plan, and not yet which rank this is."""
        self._injected: list[Plan] = []
        self._named: list[Plan] = []
        self._mine: list[Plan] = []
        self._struck: list[Plan] = []  # by identity: the same text may be given twice
        self._rank: int | None = None
        self._attempt = 0
        self._pid = 0  # 0 = identity unknown; another one = forked since
        self._observer: Callable[[int], None] | None = None
        self._entered: Callable[[str, int], None] | None = None

    def armed(self) -> bool:
        """Tell whether a fault may strike in this process, or somebody wants to hear of its steps."""
        return bool(self._mine) or self._observer is not None

    def observe(self, observer: Callable[[int], None], entered: Callable[[str, int], None] | None) -> None:
        """See `observe`."""
        self._observer, self._entered = observer, entered
        on_change()

    def add(self, plan: Plan) -> None:
        """Add one plan at run time."""
        self._injected.append(plan)
        self._select()

    def load(self, text: str, rank: int | None, attempt: int) -> None:
        """Take the plans of `text` and say who this process is; a later call corrects the identity.

        Raises ConfigError.
        """
        plans = parse(text)
        if plans != self._named:
            self._named = plans
        self._rank, self._attempt, self._pid = rank, attempt, os.getpid()
        self._select()

    def meet(self, where: str, name: str, step: int, is_beat: bool) -> None:
        """Strike what is due."""
        if os.getpid() != self._pid:
            return  # before the start, or in a child (a DataLoader's worker) that is no rank
        if self._observer is not None and is_beat and where == "inside":
            self._observer(step)
        if self._entered is not None and not is_beat and where == "inside":
            self._entered(name, step)
        for plan in list(self._mine):
            if plan.due(where, name, step, is_beat):
                self._strike(plan, where, name, step)

    def _select(self) -> None:
        plans = [plan for plan in self._injected + self._named if plan.lasts or not self._has_struck(plan)]
        before = self.armed()
        self._mine = [plan for plan in plans if plan.concerns(self._rank, self._attempt)] if self._pid else plans
        if self.armed() != before:
            on_change()

    def _has_struck(self, plan: Plan) -> bool:
        return any(plan is struck for struck in self._struck)

    def _strike(self, plan: Plan, where: str, name: str, step: int) -> None:
        if not plan.lasts:
            self._mine.remove(plan)
        is_new = not self._has_struck(plan)
        if is_new:
            self._struck.append(plan)
        tell = functools.partial(self._tell, plan, where, name, step)
        if (later := _die_in_save if plan.where == "save" else _LATER.get(plan.kind)) is not None:
            later(plan, tell)
            return
        if is_new:
            tell()
        plan.strike()

    def _tell(self, plan: Plan, where: str, name: str, step: int) -> None:
        """Say on the screen, and to whoever keeps the journal, that the fault strikes now."""
        moment = "at its start" if where == "start" else f"at step {step} {where} '{name}'"
        console.say(f"injected fault: {plan} strikes rank {self._rank} {moment}")
        is_named = any(plan is named for named in self._named)
        given_by = f"RESILIENCE_FAULT={plan}" if is_named else f"faults.inject() as {plan}"
        on_strike(given_by, None if where == "start" else step)


_injector = Injector()

# Called whenever `armed()` changes; the session sets it, so that blocks are made anew.
on_change: Callable[[], None] = lambda: None  # noqa: E731 - replaced by the session

# Called before a fault strikes for the first time, with how it was given and the step; the session journals it.
on_strike: Callable[[str, int | None], None] = lambda given_by, step: None  # noqa: E731 - replaced by the session

# Returns the process id of the "monitor" or the "launcher" of this rank, None where there is none; set by the session.
find_process: Callable[[str], int | None] = lambda name: None  # noqa: E731 - replaced by the session

_is_told: Callable[[], bool] | None = None  # see `slow_until`

run_directory: Path | None = None
"""Where this rank's job writes; set by the session."""


def inject(
    kind: str,
    *,
    rank: int | None = None,
    step: int | None = None,
    attempt: int | str | None = 0,
    **options: Any,
) -> None:
    """Plan a fault in this process: `inject("hang", rank=1, step=40)`. Call it on every rank alike.

    Args:
        kind: `hang` (`how=` sleep, c, gil, stop), `kill` (`how=` sigkill, segv, abort, exit with `code=`,
            exception), `slow` (`seconds=` added at every step from `step` on), `preempt` (SIGTERM as from a
            scheduler, `to=` rank or job: its launcher), `pause` (stopped for `seconds=`), `nan` (a gradient of the
            next optimizer step is not a number), `disk-full` (the next `torch.save` fails half-way),
            `corrupt-checkpoint` (the newest checkpoint is cut in half, or where none of ours is there the next
            `torch.save`, and the rank is killed), `monitor-kill`, or a short word: `hang-gil`, `exit`, `exception`.
        rank: the rank it strikes; None strikes every rank.
        step: the step as the heartbeat counts it; None means the first that comes.
        attempt: strike only in this attempt; None or "any" strikes in each.
        **options: `section=` strike on entering this section instead of the heartbeat; `where=` "inside",
            "outside" (right after leaving the heartbeat), "start" (before the first beat), or "save" (`kill` alone: in
            the next `torch.save`, half of which is written then).

    Raises:
        ConfigError: a kind, option or value is not known; the message names it and the nearest match.
    """
    given = {"rank": rank, "step": step, "attempt": "any" if attempt is None else attempt, **options}
    _injector.add(_plan(kind, {key: value for key, value in given.items() if value is not None}, kind))


def parse(text: str) -> list[Plan]:
    """Return the plans in `text`, written `kind:key=value,key=value;kind:...`. Raises ConfigError."""
    try:
        return [_parse_one(part) for part in filter(None, (piece.strip() for piece in text.split(";")))]
    except ConfigError as error:
        raise ConfigError(f"RESILIENCE_FAULT: {error}") from None


def _parse_one(text: str) -> Plan:
    kind, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (piece.strip() for piece in option.partition("="))
        if not equals:
            raise ConfigError(f"fault {text!r}: {option!r} is not key=value")
        options[key] = value
    return _plan(kind.strip(), options, text)


def armed() -> bool:
    """Tell whether a fault is planned for this process, so that its blocks must ask."""
    return _injector.armed()


def load(text: str, rank: int | None, attempt: int) -> None:
    """Take over `RESILIENCE_FAULT` and the identity of this process; again when the identity is corrected."""
    _injector.load(text, rank, attempt)


def missing_ranks(text: str, world_size: int) -> list[Plan]:
    """Return the plans in `text` for ranks that a job of this size does not have. Raises ConfigError."""
    return [plan for plan in parse(text) if plan.rank is not None and plan.rank >= world_size]


def observe(observer: Callable[[int], None], entered: Callable[[str, int], None] | None = None) -> None:
    """Have `observer` hear of each step of this rank, by its number: as it begins, or at its end where no block is.

    `entered` hears of each section that is entered, with the step it belongs to.
    """
    _injector.observe(observer, entered)


def slow_until(told: Callable[[], bool]) -> None:
    """End what `slow` adds to the steps of this process as soon as `told` says so: it is asked at short intervals."""
    global _is_told
    _is_told = told


def reached(name: str, step: int, beat: bool | None = None) -> None:
    """Strike what is due on entering the block `name`; `beat` tells heartbeats apart (None: by the name)."""
    _injector.meet("inside", name, step, name == _DEFAULT_BEAT if beat is None else beat)


def left(name: str, step: int) -> None:
    """Strike what is due right after leaving the heartbeat `name`."""
    _injector.meet("outside", name, step, True)


def started() -> None:
    """Strike what is due when the session has started, before the first beat."""
    _injector.meet("start", _DEFAULT_BEAT, -1, True)


# -- reading a plan


def _plan(kind: str, options: Mapping[str, Any], text: str) -> Plan:
    kind, short = _SHORT.get(kind, (kind, None))
    ways = _WAYS.get(kind)
    if ways is None:
        raise ConfigError(f"fault {text!r}: unknown kind {kind!r}{_nearest(kind, (*_WAYS, *_SHORT))}")
    own = _OWN.get(kind, ())
    values: dict[str, Any] = {} if short is None else {"how": short}
    if short is not None and options.get("how", short) != short:
        raise ConfigError(f"fault {text!r}: {text.partition(':')[0]} is {kind} with how={short} already")
    for key, value in options.items():
        if key not in _COMMON + own:
            raise ConfigError(f"fault {text!r}: unknown key {key!r}{_nearest(key, _COMMON + own)}")
        values[key] = _value(key, value, ways, text)
    if kind in _NEEDS_SECONDS and "seconds" not in values:
        raise ConfigError(f"fault {text!r}: {kind} needs seconds=, {_NEEDS_SECONDS[kind]}")
    if "code" in values and values.get("how") != "exit":
        raise ConfigError(f"fault {text!r}: code={values['code']} needs how=exit")
    if values.get("where") == "save" and (kind != "kill" or values.get("how", ways[0]) != "sigkill"):
        raise ConfigError(f"fault {text!r}: where=save needs kill with how=sigkill")
    if values.get("where") == "start" and ("step" in values or "section" in values):
        values = {key: value for key, value in values.items() if key not in ("step", "section")}
    return Plan(kind, values.pop("how", ways[0] if ways else None), **values)


def _value(key: str, value: Any, ways: Iterable[str], text: str) -> Any:
    choices = {"how": tuple(ways), "where": _PLACES, "to": _SIGNALLED}.get(key)
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"fault {text!r}: {key}={value} is not known{_nearest(str(value), choices)}")
        return value
    if key == "section":
        return str(value)
    if key in ("rank", "step", "attempt") and value == "any":
        return None
    try:
        number = float(value) if key == "seconds" else int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < float("inf"):
        takes = "seconds as a number" if key == "seconds" else "a whole number"
        raise ConfigError(f"fault {text!r}: {key}={value} is not right: it takes {takes}, 0 or more")
    return number


def _nearest(word: str, known: Iterable[str]) -> str:
    import difflib

    known = list(known)
    matches = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(known)}"


# -- striking


def _slow(plan: Plan) -> None:
    left_s = plan.seconds or 0.0
    if _is_told is None:
        time.sleep(left_s)
        return
    until_s = time.monotonic() + left_s
    while left_s > 0 and not _is_told():
        time.sleep(min(left_s, _ASK_EVERY_S))
        left_s = until_s - time.monotonic()


def _preempt(plan: Plan) -> None:
    """Send SIGTERM: to this rank, or to the process that a scheduler signals, our launcher or what stands for it."""
    pid = os.getpid() if plan.to == "rank" else find_process("launcher") or os.getppid()
    os.kill(pid, signal.SIGTERM)


_resumers: list[subprocess.Popen[bytes]] = []  # kept: an object that goes warns of a process that still runs


def _pause(plan: Plan) -> None:
    from subprocess import DEVNULL

    from resilience_sdk.system import programs

    me = str(os.getpid())
    _resumers.append(programs.start(programs.RESUMER, str(plan.seconds or 0.0), me, stdin=DEVNULL, stdout=DEVNULL))
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill_monitor(plan: Plan) -> None:
    pid = find_process("monitor")
    if pid is None:
        console.say(f"injected fault: {plan} finds no monitor")
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _spoil_gradient(plan: Plan, tell: Callable[[], None]) -> None:
    """Make a gradient of the next optimizer step NaN, as broken data or a broken device would."""
    module = sys.modules.get("torch.optim.optimizer")
    if module is None:
        console.say(f"injected fault: {plan} finds no optimizer of torch")
        return

    def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        weight = next((one for one in weights if one.requires_grad), None)
        if weight is None:
            return
        handle.remove()
        tell()
        if weight.grad is not None:
            weight.grad.fill_(float("nan"))
        # A step with a closure computes its gradients only now, and throws away those that are there.
        backward: Any = weight.register_hook(lambda gradient: (backward.remove(), gradient * float("nan"))[1])

    handle: Any = module.register_optimizer_step_pre_hook(before_step)


def _fill_disk(plan: Plan, tell: Callable[[], None]) -> None:
    """Let the next save fail half-way, with what the kernel says of a full disk."""

    def fail(target: Any) -> None:
        torch_saves.ignore(fail)
        tell()
        with contextlib.suppress(OSError):
            torch_saves.tear(target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), torch_saves.place_of(target))

    torch_saves.listen(fail)


def _corrupt(plan: Plan, tell: Callable[[], None]) -> None:
    """Cut the newest checkpoint in half and die: the next attempt finds what a death in the middle of a save leaves.

    Where no checkpoint of ours is there, it is the next save that dies half-way.
    """
    if (newest := _newest_payload()) is not None:
        tell()
        torch_saves.tear(newest)
        os.kill(os.getpid(), signal.SIGKILL)
    _die_in_save(plan, tell)


def _die_in_save(plan: Plan, tell: Callable[[], None]) -> None:
    """Let this rank die in the middle of its next save."""

    def die(target: Any) -> None:
        torch_saves.ignore(die)
        tell()
        with contextlib.suppress(OSError):
            torch_saves.tear(target)
        os.kill(os.getpid(), signal.SIGKILL)

    torch_saves.listen(die)


def _newest_payload() -> Path | None:
    """Return the largest file of the newest committed checkpoint of the run directory, None where there is none."""
    if run_directory is None:
        return None
    with contextlib.suppress(OSError):
        committed = sorted(path.parent for path in run_directory.glob("checkpoints/step-*/manifest.json"))
        files = [path for path in committed[-1].rglob("*") if path.is_file()] if committed else []
        files = [path for path in files if path.name != "manifest.json"]
        return max(files, key=lambda path: path.stat().st_size, default=None)
    return None


def _hang(plan: Plan) -> None:
    how = plan.how or "sleep"
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleep":
        while True:
            time.sleep(_LONG_S)  # one that wakes up each second would poll, which is something else
    else:
        _deadlock(holding_the_gil=how == "gil")


def _deadlock(*, holding_the_gil: bool) -> None:
    """Lock one mutex twice: the thread waits in C for ever, and a signal does not bring it back to Python.

    `pause()` or `sleep()` would return on every signal, and Python would then run its handlers.
    """
    import ctypes

    libc: Any = (ctypes.PyDLL if holding_the_gil else ctypes.CDLL)(None)
    mutex = ctypes.create_string_buffer(256)  # larger than any platform's pthread_mutex_t
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    while True:
        libc.pthread_mutex_lock(mutex)


def _kill(plan: Plan) -> None:
    if plan.how == "exception":
        raise InjectedError(f"injected fault: {plan}")
    if plan.how == "exit":
        raise SystemExit(plan.code)
    if plan.how == "abort":
        os.abort()
    if plan.how == "segv":
        import ctypes

        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


_STRIKES: Mapping[str, Callable[[Plan], None]] = {
    "hang": _hang,
    "kill": _kill,
    "slow": _slow,
    "preempt": _preempt,
    "pause": _pause,
    "monitor-kill": _kill_monitor,
}
# Those that wait for what they strike, and say only then that they do.
_LATER: Mapping[str, Callable[[Plan, Callable[[], None]], None]] = {
    "nan": _spoil_gradient,
    "disk-full": _fill_disk,
    "corrupt-checkpoint": _corrupt,
}
