"""How many cache lines a step with everything on touches: what it costs once other things have used the caches.

A processor that allows no look at its counters tells nothing of its caches, but which addresses a step touches does not
depend on the machine: `valgrind --tool=lackey` tells each. Held against the times of `--only everything`, a line takes
the same time in each kind of step, whatever that does. `python -m tests.bench.footprint` prints the table, in some ten
minutes; it needs Debian's package valgrind.
"""

from __future__ import annotations

import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from tests.bench import processes

KINDS = ("without", "empty `with`", "`with` of a lock in C", "everything on")
_LINE_BYTES, _PAGE_BYTES = 64, 4096
_MARKS = "60000000000"  # all but the last digit of `programs.footprint.MARKS`
_ACCESS = re.compile(r"^(I| [LSM])\s+([0-9a-f]+),(\d+)$")
_MOST_S = 3600.0


@attrs.frozen
class Touched:
    """What one step has run and touched."""

    kind: int
    instructions: int
    code_lines: int
    data_lines: int
    pages: int


def touched(trace: Iterable[str]) -> Iterator[Touched]:
    """Yield what was touched from each mark of a begin (0 to 7) to that of its end. Pure."""
    kind: int | None = None
    code, data, instructions = set[int](), set[int](), 0
    for text in trace:
        found = _ACCESS.match(text)
        if found is None:
            continue
        how, address, size = found[1].strip(), found[2], int(found[3])
        if how != "I" and address[:-1] == _MARKS:
            number = int(address[-1], 16)
            if number < 8:
                kind, code, data, instructions = number, set(), set(), 0
            elif kind is not None:
                pages = {line * _LINE_BYTES // _PAGE_BYTES for line in code | data}
                yield Touched(kind, instructions, len(code), len(data), len(pages))
                kind = None
            continue
        first = int(address, 16)
        lines = range(first // _LINE_BYTES, (first + size - 1) // _LINE_BYTES + 1)
        (code if how == "I" else data).update(lines)
        instructions += how == "I"


def main() -> int:
    """Trace and print."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        sys.exit("valgrind is missing: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        steps = list(touched(_trace(valgrind, Path(folder))))
    print(f"{'a step':24}{'instructions':>14}{'lines of code':>15}{'of data':>10}{'pages':>8}")
    for kind, name in enumerate(KINDS):
        of_kind = [step for step in steps if step.kind == kind][-5:]
        middle = [
            statistics.median(getattr(step, field.name) for step in of_kind) for field in attrs.fields(Touched)[1:]
        ]
        print(f"{name:24}{middle[0]:14.0f}{middle[1]:15.0f}{middle[2]:10.0f}{middle[3]:8.0f}")
    return 0


def _trace(valgrind: str, folder: Path) -> Iterator[str]:
    """Yield the accesses between marks; `sed` passes over the many before, ten times as fast as Python would."""
    program = str(processes.PROGRAMS / "footprint.py")
    command = shlex.join([valgrind, "--tool=lackey", "--trace-mem=yes", "--log-fd=9", sys.executable, program])
    script = f"exec {command} 9>&1 1>/dev/null"
    env = processes.environment(RESILIENCE_RUN_DIR=str(folder / "run"), PYTHONHASHSEED="0")
    with (
        subprocess.Popen(["sh", "-c", script], env=env, cwd=folder, stdout=subprocess.PIPE) as traced,
        subprocess.Popen(
            ["sed", "-n", f"/^ S {_MARKS}[0-7],/,/^ S {_MARKS}[89a-f],/p"],
            stdin=traced.stdout,
            stdout=subprocess.PIPE,
            text=True,
        ) as marked,
    ):
        assert marked.stdout is not None
        yield from marked.stdout
        traced.wait(_MOST_S)


if __name__ == "__main__":
    sys.exit(main())
