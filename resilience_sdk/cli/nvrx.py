"""`resilience nvrx`: the place of an `ft_launcher` that is ours, for scripts that call NVIDIA's.

    export PATH="$(resilience nvrx):$PATH"

is the one line that a job script gets; everything else in it stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from resilience_sdk.cli.common import CommandParser, print_json, print_lines
from resilience_sdk.core.settings.nvrx import provided_directory


def main(argv: Sequence[str]) -> int:
    """Print the directory and return 0; ConfigError where NVIDIA's extension itself is installed."""
    parser = CommandParser("nvrx", "Print the directory of an ft_launcher that is `resilience run --provide-nvrx`.")
    parser.add_argument("--json", action="store_true", help="print JSON; docs/commands.md has the schema")
    options = parser.parse_args(argv)
    place = provided_directory("resilience nvrx")
    if options.json:
        print_json({"path": str(place / "bin"), "python_path": str(place)})
    else:
        print_lines([str(place / "bin")])
    return 0
