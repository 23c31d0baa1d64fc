"""`resilience report`: a run directory as one page, in one file that can be opened anywhere and sent to a colleague.

With `--json` the facts of the page are printed instead, which needs no template engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from resilience_sdk.cli.common import open_run_dir, print_json, print_lines, reading_parser
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.errors import ConfigError
from resilience_sdk.report.read import read_run

_NAME = "report.html"


def main(argv: Sequence[str]) -> int:
    """Write the page, say where it is and return 0; raises RunDirectoryError for a directory that cannot be read."""
    parser = reading_parser("report", "Write what a run tells as one page: what happened, why, where the time went.")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"where to write it; without it {_NAME} in the run directory"
    )
    options = parser.parse_args(argv)
    if options.json and options.output is not None:
        raise ConfigError("--json prints the facts and writes no page: leave one of --json and --output out")
    run_dir = open_run_dir(options.run_dir)
    if options.json:
        print_json(attrs.asdict(read_run(run_dir)))
        return 0
    from resilience_sdk.report.page import render_page  # an extra brings what it needs

    output = run_dir.report if options.output is None else Path(options.output)
    page = render_page(read_run(run_dir))
    write_page(output, page)
    print_lines(
        [
            f"report         {output}",
            f"size           {len(page.encode()) / 1000:.0f} kB in one file, to open in a browser or to send",
        ]
    )
    return 0


def write_page(output: Path, page: str) -> None:
    """Write a page as a whole or not at all; raises ConfigError where there is no place for it."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory: name the file, such as {output / _NAME}")
    try:
        write_whole(output, page)
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {output} ({error.strerror or error}): choose a place with --output FILE"
        ) from error
