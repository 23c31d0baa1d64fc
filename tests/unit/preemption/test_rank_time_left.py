"""The time that is left to a rank: told by the scheduler, torchrun or the cloud, or nobody."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from metadata_services import Gce, serving
from rank_programs import LOOP, NO_PLACE, run


def ending_in(seconds, program):
    """Return that loop in a job which the scheduler ends so long after the imports, however long they take."""
    return program.replace("heard = []", f"heard = []; os.environ['SLURM_JOB_END_TIME'] = str(time.time() + {seconds})")


@pytest.mark.slow
def test_a_long_save_has_all_the_time_that_the_scheduler_leaves(tmp_path):
    """A save takes longer than `preempt_time`, so the job stops earlier, and keeps what it has won by that."""
    program = LOOP.format(ask="from resilience_sdk.preemption import listener; listener.begin(lambda: 100.0)")
    program = program.replace("assert preemption.time_left() is None", "")
    program = program.replace("50 < preemption.time_left() <= 60", "preemption.time_left() > 1.2")
    ended = run(tmp_path, ending_in(8, program), RESILIENCE_PREEMPT_TIME="1")
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", [{}, NO_PLACE], ids=["page", "no page"])
def test_the_end_that_the_scheduler_told_is_a_notice(tmp_path, place):
    """`preempt_time` before it the job stops, without any signal; not before, and with what is left until then."""
    program = LOOP.format(ask="").replace("assert preemption.time_left() is None", "began = preemption.time_left()")
    program = program.replace("50 < preemption.time_left() <= 60", "began, preemption.time_left()")
    ended = run(tmp_path, ending_in(9, program), RESILIENCE_PREEMPT_TIME="4", **place)
    assert ended.returncode == 75, ended.stderr
    heard, began, left = ended.stdout.split()
    assert heard == "[]"
    assert 6 < float(began) <= 9
    assert 0 < float(left) <= 4


@pytest.mark.slow
def test_under_torchrun_a_signal_leaves_no_more_than_its_30_seconds(tmp_path):
    """It kills its ranks then, whatever `preempt_time` says; a request has the time of the setting."""
    for number, (ask, most) in enumerate({"os.kill(os.getpid(), 15)": 30, "preemption.request('x')": 60}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        program = LOOP.format(ask=ask).replace("50 < preemption.time_left() <= 60", "preemption.time_left()")
        ended = run(folder, program, TORCHELASTIC_RUN_ID="here")
        assert most - 10 < float(ended.stdout.split()[-1]) <= most, ended.stderr


def test_a_notice_of_the_cloud_stops_the_job_with_the_time_that_the_cloud_gives(tmp_path):
    """The monitor asks the metadata service; no signal comes, and 30 s are left instead of the 60 s of the setting."""
    program = LOOP.format(ask="").replace("50 < preemption.time_left() <= 60", "20 < preemption.time_left() <= 30")
    with serving(Gce()) as gce:
        gce.documents["preempted"] = "TRUE"
        program = program.replace("assert preemption.time_left() is None\n", "")
        ended = run(tmp_path, program, RESILIENCE_CLOUD_NOTICES="gcp", RESILIENCE_CLOUD_ENDPOINT=gce.url)
    assert (ended.returncode, ended.stdout) == (75, "[] True\n"), ended.stderr


@pytest.mark.slow
def test_a_request_in_vain_keeps_no_time_for_a_last_save(tmp_path):
    """A loop that checks no more cannot stop: it goes on, and periodic saves go on, too."""
    program = """
import os, pathlib, time
from resilience_sdk import preemption
preemption.check()
preemption.request("maintenance")
end = time.monotonic() + 40
known = []
while (left := preemption.time_left()) is not None:
    known.append(left)
    time.sleep(0.01)
    assert time.monotonic() < end
print(0 < max(known) <= 1, min(known))
journal = pathlib.Path(os.environ["RESILIENCE_RUN_DIR"]) / "journal"
while not any("no stop was agreed in time" in path.read_text() for path in journal.iterdir()):
    time.sleep(0.01)
    assert time.monotonic() < end
"""
    ended = run(tmp_path, program, RESILIENCE_PREEMPT_TIME="1")
    assert (ended.returncode, ended.stdout) == (0, "True 0.0\n"), ended.stderr
