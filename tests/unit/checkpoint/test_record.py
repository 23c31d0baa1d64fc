"""A checkpointer without a journal of its own asks for the rank's when it has something to say, and never before."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest

from resilience_sdk.checkpoint.history import CheckpointRecord, JournalPlace
from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory


@pytest.fixture
def run_dir(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def journal(run_dir, writer="rank0"):
    return Journal(run_dir.journal, writer=writer, host="here", boot_id="", job="job")


def steps(events):
    return [event["step"] for event in events]


def test_a_journal_that_is_given_is_the_one(run_dir):
    """A run has its session's; nobody else is asked."""
    record = CheckpointRecord(run_dir, journal(run_dir), find=lambda _: pytest.fail("asked"))
    record.emit(Event.CKPT_COMMIT, 4)
    assert steps(record.events()) == [4]


def test_it_is_asked_for_once_and_by_each_process(run_dir, tmp_path):
    """A rank may be forked after its checkpointer was made, and must not write as its parent."""
    asked = tmp_path / "asked"

    def find(where):
        with asked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return JournalPlace(journal(where, f"rank{os.getpid()}"))

    record = CheckpointRecord(run_dir, None, find=find)
    assert not asked.exists()
    for step in (1, 2):
        record.emit(Event.CKPT_COMMIT, step)
    child = os.fork()
    if child == 0:
        try:
            for step in (3, 4):
                record.emit(Event.CKPT_COMMIT, step)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert asked.read_text().split() == [str(os.getpid()), str(child)]
    assert steps(record.events()) == [1, 2, 3, 4]
    assert len(list(run_dir.journal.glob("*.jsonl"))) == 2


def test_a_process_that_records_nothing_saves_all_the_same(run_dir):
    """A DataLoader worker, a helper of a rank, an SDK that is switched off; a place may come later."""
    places = [None, None, JournalPlace(journal(run_dir))]
    record = CheckpointRecord(run_dir, None, find=lambda _: places.pop(0))
    record.emit(Event.CKPT_BEGIN, 1)
    assert record.events() == ()
    record.emit(Event.CKPT_COMMIT, 2)
    assert steps(record.events()) == [2]


def test_incidents_of_a_job_that_writes_elsewhere_count(run_dir, tmp_path):
    """Which checkpoint kills is told by resumes in one place and crashes in the other, in the order of time."""
    job = RunDirectory.create(tmp_path / "job")
    record = CheckpointRecord(run_dir, None, find=lambda where: JournalPlace(journal(where), elsewhere=job.journal))
    record.emit(Event.RESUME, 1)
    journal(job, "launcher").emit(Event.INCIDENT, step=2)
    record.emit(Event.RESUME, 3)
    assert steps(record.events()) == [1, 2, 3]
    assert steps(read_journal(run_dir.journal).events) == [1, 3]


def open_below(folder):
    """Return the files of this process that are open below a directory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(folder))]


def test_many_checkpointers_do_not_use_up_the_files_of_a_process(run_dir):
    """A search over settings makes one for each trial."""
    gc.freeze()  # not to look five times through all that other tests have imported
    for trial in range(5):
        record = CheckpointRecord(
            run_dir, None, find=lambda where, n=trial: JournalPlace(journal(where, f"rank{n}"), is_own=True)
        )
        record.emit(Event.CKPT_COMMIT, trial)
        assert len(open_below(run_dir.path)) == 1
        del record
        gc.collect()
    assert not open_below(run_dir.path)


def test_a_journal_that_cannot_be_written_is_said_once_and_hurts_nobody(run_dir, capsys):
    """A disk that is full or gone takes the events, not the training."""
    place = journal(run_dir)
    place.path.mkdir()
    record = CheckpointRecord(run_dir, None, find=lambda _: JournalPlace(place, is_own=True))
    for step in (1, 2):
        record.emit(Event.CKPT_COMMIT, step)
    assert capsys.readouterr().err.count("cannot write the journal") == 1
