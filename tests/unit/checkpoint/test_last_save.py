"""The last save: what is waited for, for how long, and what is said of it. One process, with errors of the system."""

import errno
import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.failure import Unsaved, number_of, number_of_parts
from resilience_sdk.checkpoint.last_save import End, SpareDescriptors, lost_words, save_patiently
from resilience_sdk.checkpoint.ranks import Alone
from resilience_sdk.errors import CheckpointError, NotSavedError

FULL = Unsaved(60, "No space left on device", errno.ENOSPC)


class Terms:
    """A job that allows a wait of so long, with so much time left: until somebody's stop, or a scheduler's end."""

    def __init__(self, limit_s, left_s=None, *, asked=True):
        self.limit_s = limit_s
        self.ends_s = None if left_s is None else time.monotonic() + left_s
        self.asked = asked and left_s is not None
        self.checks = 0

    def wait_limit_s(self):
        return self.limit_s

    def time_left(self):
        return None if self.ends_s is None else max(0.0, self.ends_s - time.monotonic())

    def is_asked(self):
        return self.asked

    def hears_stops(self):
        return True

    def asks_stop(self, step):
        self.checks += 1
        return self.asked


def wait(place, terms, outcomes):
    """Save with these outcomes, the last of them for ever; return the end and how many tries were made."""
    tries, told = [], []

    def save():
        tries.append(outcomes[min(len(tries), len(outcomes) - 1)])
        return tries[-1]

    end = save_patiently(
        save,
        lambda: True,
        place,
        Alone(),
        terms,
        expected_s=0.0,
        is_stop=False,
        report=lambda *told_: told.append(told_),
    )
    return end, len(tries), told


def test_what_passes_is_tried_again_until_it_works(tmp_path, capsys):
    """Said once at the beginning, with the path, the number and the end of the wait, and once at the end."""
    end, tries, told = wait(tmp_path, Terms(60), [FULL, FULL, None])
    assert (end.unsaved, tries) == (None, 3)
    assert [saved for _, saved, _ in told] == [False, True]
    said = capsys.readouterr().err
    assert f"No space left on device [ENOSPC]; all ranks wait for {tmp_path} to take writes" in said
    assert "saved after all" in said


def test_the_wait_ends_with_the_limit(tmp_path):
    """Not before it, and not much after it."""
    began_s = time.monotonic()
    end, _, told = wait(tmp_path / "not there", Terms(0.6), [FULL])
    assert end.unsaved == FULL
    assert 0.6 <= end.waited_s <= time.monotonic() - began_s
    assert not end.leaves
    assert told[-1][1] is False


@pytest.mark.parametrize(
    ("limit_s", "until"), [(3 * 86400, r"until \d{4}-\d\d-\d\d "), (1e18, "until at an unknown time")]
)
def test_a_wait_of_days_has_the_date_of_its_end(tmp_path, capsys, limit_s, until):
    """However long the limit is, no clock ends a training."""
    assert wait(tmp_path, Terms(limit_s), [FULL, None])[0].unsaved is None
    assert re.search(until, capsys.readouterr().err)


def test_a_stop_ends_the_wait_before_its_time_is_over(tmp_path):
    """Agreed on at a meeting; some of the time is kept for the end of the processes."""
    terms = Terms(60, left_s=2.6)
    end, _, _ = wait(tmp_path / "not there", terms, [FULL])
    assert (end.is_stopped, end.is_cut, terms.checks) == (True, True, 1)
    assert terms.time_left() >= 1.5


def test_an_end_that_the_scheduler_has_told_is_no_stop(tmp_path, capsys):
    """Under Slurm each job knows its end from the first step on: the limit ends the wait, and the job has failed."""
    terms = Terms(0.6, left_s=3600, asked=False)
    end, _, _ = wait(tmp_path / "not there", terms, [FULL])
    assert (end.unsaved, end.leaves) == (FULL, False)
    assert "(wait_limit: 1 s)" in capsys.readouterr().err
    assert terms.checks <= 3, "as seldom as without an end"


def test_the_scheduler_s_end_cuts_a_wait_that_would_outlast_it(tmp_path, capsys):
    """The job leaves before it, to be requeued."""
    end, _, _ = wait(tmp_path / "not there", Terms(60, left_s=2.6, asked=False), [FULL])
    assert (end.is_stopped, end.is_cut, end.leaves) == (False, True, True)
    assert "the time that the scheduler leaves" in capsys.readouterr().err


def test_a_stop_within_a_known_end_keeps_a_part_of_its_own_time(tmp_path):
    """Of 3 s it takes 2 for the end of the processes, not the 10 that belong to hours."""
    terms = Terms(60, left_s=3600, asked=False)

    def ask():
        terms.asked, terms.ends_s = True, time.monotonic() + 3

    threading.Timer(0.3, ask).start()
    end, _, _ = wait(tmp_path / "not there", terms, [FULL])
    assert (end.is_stopped, end.is_cut) == (True, True)
    assert 0.8 <= end.waited_s <= 2.5


def test_where_not_even_the_directory_could_be_made_the_save_is_tried(tmp_path):
    """Nobody makes it meanwhile: the first save of all does."""
    end, tries, _ = wait(tmp_path / "not there", Terms(60), [FULL, None])
    assert (end.unsaved, tries) == (None, 2)


def test_a_spare_descriptor_that_the_program_has_closed_is_not_closed_again():
    """Its number may be a file of the program's by then."""
    spare = SpareDescriptors()
    spare.keep()
    number = spare._kept[0][0]
    mine = os.open(__file__, os.O_RDONLY)
    try:
        os.dup2(mine, number)
        spare.give_back()
        assert os.pread(number, 3, 0) == b'"""'
    finally:
        os.close(mine)
        os.close(number)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EROFS, None])
def test_what_does_not_pass_is_not_waited_for(tmp_path, number):
    """One try."""
    unsaved = Unsaved(60, "why", number)
    end, tries, told = wait(tmp_path, Terms(60), [unsaved])
    assert (end.unsaved, tries, told) == (unsaved, 1, [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_what_passes(number):
    """A full disk, a quota, a storage that does not answer."""
    assert Unsaved(1, "why", number).passes


def test_error_numbers_that_a_system_does_not_have_are_done_without():
    """EREMOTEIO is Linux's alone, and a training runs elsewhere, too."""
    program = "import errno; del errno.EREMOTEIO; import resilience_sdk.checkpoint.failure"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_rank_whose_failure_lasts_is_enough():
    """The others need not wait for it."""
    full, denied = ({"error": "x", "number": number} for number in (errno.ENOSPC, errno.EACCES))
    fine = {"error": None}
    assert number_of_parts([fine, full]) == errno.ENOSPC
    assert number_of_parts([full, denied]) == errno.EACCES
    assert number_of_parts([full, {"error": "x", "number": None}]) is None


def test_the_number_is_found_wherever_a_library_has_put_it():
    """In the chain, in the failures of all ranks, in the words of another language."""
    full = OSError(errno.ENOSPC, "No space left on device")
    chained = RuntimeError("unexpected pos 64 vs 0")
    chained.__cause__ = full
    of_dcp = RuntimeError("failed")
    of_dcp.failures = {1: (chained, None)}
    told = CheckpointError("rank 1: full")
    told.number = errno.ENOSPC
    rust = RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })')
    assert {number_of(one) for one in (full, chained, of_dcp, told, rust)} == {errno.ENOSPC}
    assert number_of(RuntimeError("nothing of the kind")) is None


def test_what_is_lost_is_said_in_steps():
    """By the newest good checkpoint; what came behind the last step has none."""
    assert lost_words(FULL, 40, End(FULL)).startswith("steps 40 to 59 (20 steps) ARE LOST")
    assert lost_words(FULL, 59, End(FULL)).startswith("step 59 IS LOST")
    assert lost_words(FULL, None, End(FULL)).startswith("steps 0 to 59 (60 steps) ARE LOST")
    assert lost_words(FULL, 60, End(FULL)).startswith("what followed step 59 IS LOST")


def test_without_descriptors_it_ends_at_once(tmp_path, capsys):
    """A save in mid-training goes on without; the last one is raised, and said with what is lost and what to do."""
    saver = Checkpointer({"weight": torch.zeros(4)}, run_dir=tmp_path / "run")
    assert saver.save(1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        assert not saver.save(2)
        with pytest.raises(
            NotSavedError, match=r"steps 1 to 2 \(2 steps\) ARE LOST.*Too many open files.*after 1 step "
        ):
            saver.save(3, last=True)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "training goes on" in capsys.readouterr().err
    assert saver.save(3, last=True)
    assert saver.unsaved is None
    saver.raise_unsaved()
    assert sorted(path.name for path in Path(tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000001",
        "step-00000003",
    ]
