"""The command `resilience rehearse`: an undisturbed run, then one job for each fault, and a line for each promise."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cli.common import CommandParser
from resilience_sdk.core.console import printable
from resilience_sdk.core.settings.fields import nearest
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.rehearse import ends, judge, plan, processes
from resilience_sdk.rehearse.jobs import SCRATCH, RehearsedJob, last_lines, rehearse
from resilience_sdk.rehearse.judge import FAIL, SKIPPED, PromiseResult
from resilience_sdk.rehearse.plan import Baseline, Deadlines, JobFacts

ALL = "all"
_DESCRIPTION = (
    "Runs your own job in a scratch directory, first undisturbed and then once for each FAULT, and holds every promise "
    f"against what came of it. FAULT is one or more of {', '.join(plan.FAULTS)}, or all. Exit code 1 when a promise "
    f"was broken. In ARGS, {SCRATCH} stands for the directory of the one job."
)
_EPILOG = "example: resilience rehearse kill preempt --nproc-per-node 2 -- train.py --steps 200"
_LINES = 12


@attrs.frozen
class Rehearsal:
    """One fault, and what came of it. `plan`: the faults as `RESILIENCE_FAULT` has them; empty where none was run."""

    fault: str
    plan: str
    seconds: float
    exit_codes: tuple[int | None, ...]
    promises: tuple[PromiseResult, ...]
    directory: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a promise was broken."""
        return any(promise.result == FAIL for promise in self.promises)

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `faults` of `resilience rehearse --json`."""
        return {
            "fault": self.fault,
            "plan": self.plan or None,
            "seconds": round(self.seconds, 3),
            "exit_codes": list(self.exit_codes),
            "promises": [judge.to_json(promise) for promise in self.promises],
            "directory": self.directory,
        }


def main(argv: Sequence[str]) -> int:
    """Rehearse as the arguments say; return 0 where every promise held or was skipped with its reason, else 1.

    Raises ConfigError for a bad argument, RunDirectoryError where `--keep` names a directory that holds something or
    cannot be made. A signal that ends it ends its job, too, and what was found until then is told.
    """
    options, script = _parse(argv)
    kinds = _kinds(options.faults)
    job = _job(options, script)
    talk = sys.stderr if options.json else sys.stdout
    scratch = Path(tempfile.mkdtemp(prefix="resilience-rehearse-")) if options.keep is None else _empty(options.keep)
    is_kept = options.keep is not None
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    theatre = _Rehearsals(job, scratch, options.stuck_after, talk)
    try:
        rehearsals = theatre.run(kinds)
        has_failed = any(one.has_failed for one in rehearsals)
        is_kept = has_failed or is_kept
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted in {theatre.place}{_conclusion(theatre.rehearsed, theatre.seconds, None)}")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if not is_kept:
            shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        told = {"ok": not has_failed, "script": script, "ranks": theatre.ranks}
        told |= {"processes": theatre.processes.kind}
        told |= {"seconds": round(theatre.seconds, 3), "estimated_seconds": theatre.estimated_s}
        told |= {"kept": str(scratch) if is_kept else None, "varying": theatre.varying}
        sys.stdout.write(json.dumps({**told, "faults": [one.to_json() for one in rehearsals]}, indent=2) + "\n")
    else:
        sys.stdout.write(_conclusion(rehearsals, theatre.seconds, scratch if is_kept else None))
    return 1 if has_failed else 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str]) -> tuple[Any, list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = CommandParser("rehearse", _DESCRIPTION)
    parser.usage = "resilience rehearse FAULT... [options] -- SCRIPT [ARGS]"
    parser.epilog = _EPILOG
    parser.add_argument("faults", nargs="+", metavar="FAULT", help="faults to rehearse, or all")
    parser.add_argument("--json", action="store_true", help="print JSON; docs/rehearse.md has the schema")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="how many ranks; default: 2")
    parser.add_argument(
        "--here",
        action="store_true",
        help="run in this directory, where the script writes its files; default: an empty one",
    )
    parser.add_argument(
        "--stuck-after",
        type=float,
        metavar="SECONDS",
        help="after how long without any movement a rank is called hung; default: where one stands still on purpose 4 "
        "of its longest steps, 4 s at least, else as in a real job",
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, metavar="SECONDS", help="longest time of one job; default: 900"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write everything to DIR and leave it there")
    options = parser.parse_args(words[:at])
    script = words[at + 1 :]
    if not script:
        raise ConfigError("no script given; usage: resilience rehearse FAULT... [options] -- SCRIPT [ARGS]")
    if options.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node takes a whole number from 1 on, not {options.nproc_per_node}")
    for name, value in (("--stuck-after", options.stuck_after), ("--limit", options.limit)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} takes seconds, more than 0, not {value:g}")
    return options, script


def _kinds(given: Sequence[str]) -> list[str]:
    for word in given:
        if word != ALL and word not in plan.FAULTS:
            known = [*plan.FAULTS, ALL]
            raise ConfigError(f"unknown fault {word!r}{nearest(word, known) or f'; known: {chr(44).join(known)}'}")
    return [kind for kind in plan.FAULTS if kind in given or ALL in given]


def _job(options: Any, script: Sequence[str]) -> RehearsedJob:
    is_module = script[0] in ("-m", "--module")
    words = list(script)
    if is_module:
        name = script[1] if len(script) > 1 else ""
        top = name.partition(".")[0] or " "
        if not (importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)):
            raise ConfigError(f"{script[0]} {name}: no such module is here or among what is installed")
    else:
        if not os.path.exists(script[0]):
            raise ConfigError(f"{script[0]} is not there; behind -- comes the script, then its arguments")
        words[0] = os.path.abspath(script[0])
    return RehearsedJob(
        words=tuple(words),
        ranks=options.nproc_per_node,
        here=os.getcwd() if options.here else None,
        python_path=os.getcwd() if is_module else None,
        limit_s=options.limit,
    )


def _empty(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_free = not any(path.iterdir())
    except FileExistsError:
        is_free = False
    except OSError as error:
        raise RunDirectoryError(f"--keep {path}: {error.strerror}; name a directory that can be made") from error
    if not is_free:
        raise RunDirectoryError(f"--keep {path}: something is there already; name a new or empty directory")
    return path.absolute()


class _Rehearsals:
    """The jobs of one call, one after the other, and what is said meanwhile."""

    def __init__(self, job: RehearsedJob, scratch: Path, stuck_after_s: float | None, talk: Any) -> None:
        self._job = job
        self._scratch = scratch
        self._stuck_after_s = stuck_after_s
        self._talk = talk
        self._again: JobFacts | None = None
        self._began_s = time.monotonic()
        self._place = ""
        self.place = ""
        """The fault that is being rehearsed."""
        self.processes = processes.Processes()
        """What the script makes of the processes that it is started as, once the undisturbed run has ended."""
        self.rehearsed: list[Rehearsal] = []
        """What was rehearsed so far."""
        self.varying: dict[str, int] | None = None
        """What two undisturbed runs do not repeat, each from which step on; None: there was only one."""
        self.estimated_s: float | None = None
        """How long all was said to take, once the undisturbed run had ended; None where there was nothing to say."""

    @property
    def ranks(self) -> int:
        """As how many ranks the job is rehearsed."""
        return self._job.ranks

    @property
    def seconds(self) -> float:
        """How long it took so far."""
        return time.monotonic() - self._began_s

    def run(self, kinds: Sequence[str]) -> list[Rehearsal]:
        """Run all, and say what comes of each."""
        self._say(
            f"{len(kinds)} fault{'' if len(kinds) == 1 else 's'}, {self._job.ranks} ranks. First the job undisturbed, "
            "which tells how long the rest takes"
        )
        self._begin("undisturbed")
        facts = self._undisturbed()
        is_one = self.processes.kind == processes.ONE
        baseline = attrs.evolve(plan.learn(facts, self._job.ranks), is_one_process=is_one)
        why_none = processes.why_none_is_struck(self.processes)
        promises = tuple(judge.judge_baseline(baseline, facts, why_none))
        first = Rehearsal("none", "", facts.seconds, facts.exit_codes, promises, str(self._scratch / "undisturbed"))
        self._show(first)
        self.rehearsed.append(first)
        if facts.exit_codes[-1] != 0 or why_none is not None:
            return self.rehearsed
        left_s = plan.estimate_s(kinds, baseline, self._stuck_after_s)
        if left_s:
            self.estimated_s = round(left_s + facts.seconds, 3)
            still = [kind for kind in kinds if kind in plan.STILL]
            stuck_s = plan.deadlines(still[0], baseline, self._stuck_after_s).stuck_after_s if still else None
            told = (
                f"; a rank that stands still is called hung after {stuck_s:g} s in {', '.join(still)}" if still else ""
            )
            self._say(f"about {_duration(left_s)} for the faults, {_duration(left_s + facts.seconds)} in all{told}")
        for number, kind in enumerate(kinds, 1):
            self._place = f"{number}/{len(kinds)} "
            self.rehearsed.append(self._rehearse(kind, baseline))
        return self.rehearsed

    def _undisturbed(self) -> JobFacts:
        """Run the job undisturbed, as many processes as it is, and return what it left."""
        deadlines = Deadlines() if self._stuck_after_s is None else Deadlines(self._stuck_after_s)
        place = self._scratch / "undisturbed"
        facts = rehearse(self._job, place, (), deadlines)
        found = processes.decide(facts, self._job.ranks)
        if found.ranks != self._job.ranks:
            self._say(f"  {found.words}")
            several, self._job = self._job, attrs.evolve(self._job, ranks=found.ranks)
            aside = place.rename(self._scratch / f"undisturbed-as-{several.ranks}")
            once = rehearse(self._job, place, (), deadlines)
            if found.is_trial and once.exit_codes[-1] != 0:
                self._job = several
                shutil.rmtree(place)
                aside.rename(place)
                found = processes.Processes(processes.UNKNOWN, several.ranks)
            else:
                shutil.rmtree(aside)
                facts = once
                if found.is_trial:
                    self._say("  as one it ends well, and so it is rehearsed")
        self.processes = found
        return facts

    def _rehearse(self, kind: str, baseline: Baseline) -> Rehearsal:
        deadlines = plan.deadlines(kind, baseline, self._stuck_after_s)
        chosen = plan.faults_for(kind, baseline, deadlines.stuck_after_s)
        if isinstance(chosen, str):
            rehearsal = Rehearsal(kind, "", 0.0, (), (PromiseResult("rehearsed", SKIPPED, chosen),))
            self._begin(kind)
            self._show(rehearsal)
            return rehearsal
        directory = self._scratch / kind
        told = ";".join(str(one) for one in chosen)
        self._begin(kind, told)
        first = chosen[0]
        facts = rehearse(self._job, directory, chosen, deadlines, lambda events: plan.has_answer(kind, first, events))
        promises = judge.judge(kind, first, baseline, facts)
        if promises[-1].result != SKIPPED or len(promises) > 1:
            promises.append(self._end(kind, baseline, facts, deadlines))
        rehearsal = Rehearsal(kind, told, facts.seconds, facts.exit_codes, tuple(promises), str(directory))
        self._show(rehearsal)
        return rehearsal

    def _end(self, kind: str, baseline: Baseline, facts: JobFacts, deadlines: Deadlines) -> PromiseResult:
        result = ends.judge_end(kind, baseline, facts, self._again)
        if result is None:
            self._say("  it differs: once more undisturbed, to see what differs by itself")
            self._again = rehearse(self._job, self._scratch / "undisturbed-again", (), deadlines)
            self.varying = ends.own_variation(baseline, self._again)
            if self.varying:
                self._say(f"  {ends.variation_words(self.varying)}")
            result = ends.judge_end(kind, baseline, facts, self._again)
        assert result is not None
        return result

    def _say(self, text: str) -> None:
        self._talk.write(f"{text}\n")
        self._talk.flush()

    def _begin(self, name: str, told: str = "") -> None:
        self.place = name
        self._say(f"\n{self._place}{name}{f'  RESILIENCE_FAULT={told}' if told else ''}")

    def _show(self, rehearsal: Rehearsal) -> None:
        width = max(len(promise.promise) for promise in rehearsal.promises)
        for one in rehearsal.promises:
            self._say(f"  {one.result:<7}  {one.promise:<{width}}  {printable(one.why)}")
            if one.cure is not None:
                self._say(f"  {'':<7}  {'':<{width}}  cure: {one.cure}")
        if rehearsal.has_failed and rehearsal.directory is not None:
            for line in last_lines(Path(rehearsal.directory), _LINES):
                self._say(f"    | {printable(line)}")
        if rehearsal.seconds:
            self._say(f"  {_duration(rehearsal.seconds)}, {_duration(self.seconds)} since the beginning")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _conclusion(rehearsals: Sequence[Rehearsal], seconds: float, kept: Path | None) -> str:
    promises = [promise for one in rehearsals for promise in one.promises]
    count = {result: sum(one.result == result for one in promises) for result in ("PASS", "FAIL", "SKIPPED")}
    text = f"\n{count['PASS']} passed, {count['FAIL']} failed, {count['SKIPPED']} skipped, in {_duration(seconds)}\n"
    if kept is not None:
        text += f"run directories and logs: {kept}/*/run and {kept}/*/output.log\n"
    return text
