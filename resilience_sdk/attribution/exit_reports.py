"""What launchers report of the ends of their ranks: torchrun's lines and summary, and srun's. Pure."""

from __future__ import annotations

import re

from resilience_sdk.attribution.log_lines import LogLine
from resilience_sdk.attribution.sightings import Exit

_LAUNCHER_EXIT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: \d+ \(pid: (?P<pid>\d+)\)")
_BLOCK_RANK = re.compile(r"^\s*rank\s*: (?P<rank>\d+) \(local_rank: \d+\)")
_BLOCK_CODE = re.compile(r"^\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
_DEAF = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")
_SRUN_EXIT = re.compile(r"srun: error: (?P<node>[\w.-]+): tasks? (?P<rank>\d+)\S*: Exited with exit code (?P<code>\d+)")
_FAILED = re.compile(
    r"failed \(exitcode|ChildFailedError|Root Cause \(first observed|srun: error: .*(?:Exited|exit code)|"
    r"Job step aborted|\bFAILED$|non-zero exit|exit(?:ed)? (?:with )?(?:code|status) [1-9]|Command exited|"
    r"mpirun (?:noticed|has exited)|Primary job +terminated"
)
_SUMMARY_LINES = 60
_MOST_EXITS = 1000


class ExitReports:
    """Reads the lines of one log, in their order.

    `failed`: the newest line that says that the job as a whole failed. `deaf`: processes that had to be killed
    because they did not react when they were asked to leave.
    """

    def __init__(self) -> None:
        self.exits: list[Exit] = []
        self.deaf: set[int] = set()
        self.failed: tuple[int, str] | None = None
        self._rank: int | None = None

    def in_summary(self, number: int) -> bool:
        """Tell whether the launcher's summary may go on at a line: it has no words of trouble of its own."""
        return self.failed is not None and number - self.failed[0] <= _SUMMARY_LINES

    def read(self, line: LogLine) -> bool:
        """Read a line; tell whether it is one that says nothing else."""
        text = line.text
        if _FAILED.search(text):
            self.failed = (line.number, text)
        if "rank" not in text and "exit" not in text and "shutdown" not in text:
            return False
        if (match := _DEAF.search(text)) is not None:
            self.deaf.add(int(match["pid"]))
        elif (match := _LAUNCHER_EXIT.search(text)) is not None:
            self._add(Exit(line.number, int(match["code"]), text=text, pid=int(match["pid"])))
        elif (match := _BLOCK_RANK.search(text)) is not None:
            self._rank = int(match["rank"])
        elif (match := _BLOCK_CODE.search(text)) is not None:
            self._add(Exit(line.number, int(match["code"]), self._rank, text=text, pid=int(match["pid"])))
        else:
            if (match := _SRUN_EXIT.search(text)) is not None:
                self._add(Exit(line.number, int(match["code"]), int(match["rank"]), match["node"], text))
            return False
        return True

    def _add(self, end: Exit) -> None:
        if len(self.exits) < _MOST_EXITS:
            self.exits.append(end)
