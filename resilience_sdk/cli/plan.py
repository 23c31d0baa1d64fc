"""`resilience plan`: the best interval between checkpoints of a job, and its expected ETTR."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import attrs

from resilience_sdk.cli.common import CommandParser, open_run_dir, print_json, print_lines
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.settings.parse import duration_or_zero
from resilience_sdk.core.words import counted, duration
from resilience_sdk.errors import ConfigError
from resilience_sdk.goodput.plan import (
    RATES,
    PlannedJob,
    best_interval_s,
    daly_s,
    expected_ettr,
    mttf_s,
    simulated_ettr,
    young_s,
)
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.report.run_state import goodput_of
from resilience_sdk.straggler.windowing import median

_MOST_GPUS = 1 << 24
_DEFAULTS = {"write": 10.0, "restart": 300.0, "detect": 60.0, "persist": 0.0}


def main(argv: Sequence[str]) -> int:
    """Print the plan and return 0; raises ConfigError for values that make no sense."""
    options = _parser().parse_args(argv)
    plan = plan_of(options)
    if options.json:
        print_json(plan)
    else:
        print_lines(render(plan))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "plan",
        "Print how often a job should save, and how much of its time is expected to be useful: in closed form, and "
        "simulated beside it.",
    )
    parser.add_argument("--gpus", type=_count, metavar="N", help="size of the job")
    parser.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="default 8")
    rates = ", ".join(f"{name} = {rate:g}" for name, rate in RATES.items())
    parser.add_argument(
        "--failures", type=_rate, metavar="RATE",
        help=f"failures per 1,000 node-days (default rsc-1); those of two clusters with A100 have names: {rates}",
    )  # fmt: skip
    parser.add_argument("--mttf", type=_duration, metavar="T", help="mean time to failure of the job, instead of both")
    parser.add_argument("--write", type=_duration, metavar="T", help="how long a save holds training up (10s)")
    parser.add_argument(
        "--persist", type=_duration, metavar="T", help="how much later it counts, in the background (0)"
    )
    parser.add_argument(
        "--restart", type=_duration, metavar="T", help="from the start of an attempt to its step (5min)"
    )
    parser.add_argument("--detect", type=_duration, metavar="T", help="from a failure to its being noticed (60s)")
    parser.add_argument("--interval", type=_duration, metavar="T", help="this interval, instead of the best one")
    parser.add_argument("--like", metavar="RUN_DIR", help="what was measured in that run, where no option says else")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulation")
    parser.add_argument("--json", action="store_true", help="print JSON; docs/goodput.md has the schema")
    return parser


def plan_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan that `--json` prints."""
    measured = _measured(options.like) if options.like else {}
    given = {name: getattr(options, name) for name in _DEFAULTS}
    values = {
        name: value if value is not None else measured.get(name, _DEFAULTS[name]) for name, value in given.items()
    }
    sources = {
        name: "given" if value is not None else "measured" if name in measured else "default"
        for name, value in given.items()
    }
    nodes, rate = None, options.failures or RATES["rsc-1"]
    if options.mttf is not None:
        mean_s, sources["mttf"] = options.mttf, "given"
    elif options.gpus is not None:
        nodes = math.ceil(options.gpus / options.gpus_per_node)
        mean_s, sources["mttf"] = mttf_s(nodes, rate), "given" if options.failures else "default"
    elif "mttf" in measured:
        mean_s, sources["mttf"] = measured["mttf"], "measured"
    else:
        if options.like:
            raise ConfigError(f"nothing has failed in {options.like}: how large is the job? give --gpus N, or --mttf T")
        raise ConfigError("how large is the job? give --gpus N, or --mttf T, or --like RUN_DIR of a run with faults")
    for name, value in (("mttf", mean_s), ("interval", options.interval)):
        if value == 0:
            raise ConfigError(f"--{name} 0: a time above 0 is needed")
    job = PlannedJob(mean_s, values["write"], values["restart"], values["detect"], values["persist"])
    if job.write_s == 0 and options.interval is None:
        raise ConfigError("a save that costs nothing has no best interval: give --write T above 0, or --interval T")
    interval_s = options.interval if options.interval is not None else best_interval_s(job)
    simulated, low, high = simulated_ettr(job, interval_s, seed=options.seed)
    return {
        "gpus": options.gpus,
        "nodes": nodes,
        "failures_per_1000_node_days": rate if nodes is not None else None,
        **attrs.asdict(job),
        "sources": sources,
        "interval_s": interval_s,
        "interval_young_s": young_s(job),
        "interval_daly_s": daly_s(job),
        "ettr": expected_ettr(job, interval_s),
        "ettr_simulated": simulated,
        "ettr_simulated_low": low,
        "ettr_simulated_high": high,
        "others": [
            {"what": what, "ettr": expected_ettr(changed, at_s or best_interval_s(changed))}
            for what, changed, at_s in _others(job, interval_s)
        ],
    }


def _others(job: PlannedJob, interval_s: float) -> list[tuple[str, PlannedJob, float | None]]:
    """Return what could be changed, one thing at a time."""
    found: list[tuple[str, PlannedJob, float | None]] = [
        ("half the interval", job, interval_s / 2),
        ("twice the interval", job, interval_s * 2),
        ("half the restart", attrs.evolve(job, restart_s=job.restart_s / 2), interval_s),
        ("noticed within 10 s", attrs.evolve(job, detect_s=min(10.0, job.detect_s)), interval_s),
        ("half the failures", attrs.evolve(job, mttf_s=job.mttf_s * 2), interval_s),
    ]
    if job.write_s:
        found.append(("a tenth of the stall, its best interval", attrs.evolve(job, write_s=job.write_s / 10), None))
    return found


def _measured(named: str) -> dict[str, float]:
    """Return what a run tells: seconds of a save's stall, of noticing a fault, of a restart, and between faults."""
    run_dir = open_run_dir(named)
    events = read_journal(run_dir.journal).events
    summary = goodput_of(events)
    commits = [event for event in events if event["event"] == Event.CKPT_COMMIT.value]
    saves = [(event.get("stall_s"), event.get("seconds")) for event in commits]
    known = [(stall, whole) for stall, whole in saves if isinstance(stall, float) and isinstance(whole, float)]
    stalls, lags = [stall for stall, _ in known], [max(0.0, whole - stall) for stall, whole in known]
    found = {"write": median(stalls)} if stalls and median(stalls) > 0 else {}
    if lags:
        found["persist"] = median(lags)
    late_s = [
        incident.detection_latency_s
        for incident in IncidentStore(run_dir.path).all()
        if incident.kind in ("crash", "hang") and incident.detection_latency_s is not None
    ]
    if late_s:
        found["detect"] = sum(late_s) / len(late_s)
    if summary.mttr_s is not None:
        found["restart"] = summary.mttr_s
    if summary.mttf_s:  # 0: it was killed before anything ran
        found["mttf"] = summary.mttf_s
    return found


def render(plan: dict[str, Any]) -> list[str]:
    """Return the plan as lines for a person."""
    sources = plan["sources"]
    size = "" if plan["nodes"] is None else f"{counted(plan['gpus'], 'GPU')} on {counted(plan['nodes'], 'node')}, "
    rate = plan["failures_per_1000_node_days"]
    told = "" if rate is None else f", {rate:g} failures per 1,000 node-days"
    low, high = plan["ettr_simulated_low"], plan["ettr_simulated_high"]
    return [
        f"job            {size}MTTF {duration(plan['mttf_s'])} ({sources['mttf']}{told})",
        *(
            f"{name:<14} {_seconds(plan[name + '_s'])} ({sources[name]})"
            for name in ("write", "persist", "restart", "detect")
        ),
        f"save every     {duration(plan['interval_s'])} (Young {duration(plan['interval_young_s'])}, "
        f"Daly {duration(plan['interval_daly_s'])})",
        f"expected ETTR  {plan['ettr']:.1%} in closed form, {plan['ettr_simulated']:.1%} simulated "
        f"({low:.1%} to {high:.1%})",
        "",
        *(f"{other['ettr']:>7.1%}  {other['what']}" for other in plan["others"]),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if 0 < seconds < 1 else duration(seconds)


def _count(text: str) -> int:
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0
    if not 0 < value <= _MOST_GPUS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {_MOST_GPUS}")
    return value


def _rate(text: str) -> float:
    value = RATES.get(text.lower())
    return _positive(text) if value is None else value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        names = ", ".join(RATES)
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, or one of {names}")
    return value


def _duration(text: str) -> float:
    try:
        return duration_or_zero(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
