"""`resilience doctor`: what will work on this machine and what will not, each with its cure."""

from __future__ import annotations

from collections.abc import Sequence

from resilience_sdk import environ
from resilience_sdk.cli.common import CommandParser, print_json, print_lines
from resilience_sdk.cli.doctor_compare import comparison, comparison_page, read_reports
from resilience_sdk.cli.doctor_page import page, settings_rows
from resilience_sdk.errors import ConfigError
from resilience_sdk.health.checkup import examine, job_context
from resilience_sdk.settings.options import add_setting_options, plain_switches, settings_from_options
from resilience_sdk.settings.parse import positive_duration

_MOST_PATIENCE = 100
_DESCRIPTION = "Look at this machine before a job: devices, limits, network, storage, versions and settings."


def main(argv: Sequence[str]) -> int:
    """Print the page and return 0; 1 when something that must be good has failed."""
    parser = CommandParser("doctor", _DESCRIPTION)
    parser.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="what the job reads; may be repeated"
    )
    parser.add_argument(
        "--rendezvous",
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where the nodes meet; without it MASTER_ADDR and MASTER_PORT",
    )
    parser.add_argument("--local-ranks", type=int, metavar="N", help="ranks on this machine, else one for each GPU")
    parser.add_argument("--compute", action="store_true", help="also let each GPU (else the CPU) compute; needs torch")
    parser.add_argument("--limit", metavar="SECONDS", help="longest time of one look, else 3.5 (GPUs: 15)")
    parser.add_argument(
        "--patience", default="1", metavar="FACTOR", help="so many times as long for each look, on a busy machine"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="look at nothing: compare what `doctor --json` wrote on several nodes, and say which to leave out",
    )
    parser.add_argument("--verbose", action="store_true", help="also what is in order, and settings at defaults")
    parser.add_argument("--json", action="store_true", help="print JSON; docs/health.md has the schema")
    add_setting_options(parser)
    options = parser.parse_args(plain_switches(argv, lambda _: False, to_the_end=True))
    if options.compare:
        return _compare(options.compare, as_json=options.json)
    if options.local_ranks is not None and options.local_ranks < 1:
        raise ConfigError(f"--local-ranks: expected 1 or more, not {options.local_ranks}")
    settings = settings_from_options(options)
    context = job_context(
        environ.environment(),
        settings,
        data=options.data,
        rendezvous=options.rendezvous,
        local_ranks=options.local_ranks,
    )
    limit_s, patience = _limit(options.limit), _patience(options.patience)
    report = examine(context, settings, compute=options.compute, limit_s=limit_s, patience=patience)
    if options.json:
        print_json({**report.to_json(), "settings": settings_rows(settings)})
    else:
        print_lines(page(report, settings, verbose=options.verbose))
    return 0 if report.ok else 1


def _compare(files: Sequence[str], *, as_json: bool) -> int:
    reports = read_reports(files)
    told = comparison(reports)
    if as_json:
        print_json(told)
    else:
        print_lines(comparison_page(reports, told))
    return 0 if told["ok"] else 1


def _limit(text: str | None) -> float | None:
    try:
        return None if text is None else positive_duration(text)
    except ValueError as error:
        raise ConfigError(f"--limit: {error}, not {text!r}") from None


def _patience(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= _MOST_PATIENCE:
        raise ConfigError(f"--patience: expected a factor from 1 to {_MOST_PATIENCE}, not {text!r}")
    return factor
