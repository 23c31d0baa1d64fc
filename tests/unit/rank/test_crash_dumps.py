"""Whose `faulthandler` is: whoever switches it on last has it."""

import subprocess
import sys

PROGRAM = """
import faulthandler, os, sys
from resilience_sdk.rank import crash_dumps
ours, theirs = (open(name, "w") for name in sys.argv[1:3])
crash_dumps.enable(ours.fileno(), lambda: print("it is the program's"))
if sys.argv[3] == "again":
    crash_dumps.enable(ours.fileno(), lambda: print("it is the program's"))
if sys.argv[3] == "program":
    faulthandler.enable(theirs)
sys.stdout.flush()
os.abort()
"""


def dumped(folder, how):
    """What such a process prints, and what stands in our file and in its own."""
    names = [folder / "ours", folder / "theirs"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *names, how], capture_output=True, text=True, check=False)
    assert done.returncode == -6, done.stderr
    return done.stdout.strip(), *(name.read_text() for name in names)


def test_the_stacks_of_a_process_that_dies_are_in_our_file(tmp_path):
    """Also where it is opened anew; nobody takes that for the program's doing."""
    for how in ("once", "again"):
        printed, ours, theirs = dumped(tmp_path, how)
        assert (printed, theirs) == ("", "")
        assert "Fatal Python error: Aborted" in ours


def test_a_program_that_switches_it_on_keeps_it(tmp_path):
    """In its file, and we are told that it is no longer ours."""
    printed, ours, theirs = dumped(tmp_path, "program")
    assert (printed, ours) == ("it is the program's", "")
    assert "Fatal Python error: Aborted" in theirs
