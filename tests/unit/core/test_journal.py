"""The journal is as private as the run."""

from __future__ import annotations

import resource
import shutil
import stat

import pytest

from resilience_sdk.core.journal import CURVES, Event, Journal, journal_sizes, read_journal
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.run_directory import RunDirectory


@pytest.mark.parametrize(("group_readable", "mode"), [(False, 0o600), (True, 0o640)])
def test_the_group_reads_the_journal_of_a_run_that_it_may_read(tmp_path, group_readable, mode):
    """`resilience status` and `why` of a colleague need the journal as well as the directory."""
    run = RunDirectory.create(tmp_path / "run", group_readable=group_readable)
    journal = Journal(run.journal, writer="rank0", host="here", boot_id="", job="job")
    journal.emit(Event.RUN_START)
    journal.close()
    assert stat.S_IMODE(journal.path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token=hf_SECRET"], ["--hf-token=[redacted]"]),
        (["--api-key", "x", "train.py"], ["--api-key", "[redacted]", "train.py"]),
        (["--wandb.api_key", "x"], ["--wandb.api_key", "[redacted]"]),
        (["api_key=x", "lr=1"], ["api_key=[redacted]", "lr=1"]),
        (["--use-token", "--lr", "1"], ["--use-token", "--lr", "1"]),
        (["--max-tokens", "4096", "--num-passes=3"], ["--max-tokens", "4096", "--num-passes=3"]),
        (["--tokenizer", "gpt2", "--tokenizer_path=a"], ["--tokenizer", "gpt2", "--tokenizer_path=a"]),
        (["--url=https://me:word@host/x"], ["--url=https://me:[redacted]@host/x"]),
    ],
)
def test_a_command_line_loses_its_secrets(words: list[str], shown: list[str]) -> None:
    """By the names of its options; what merely sounds like a secret stays readable."""
    assert redact_argv(words) == shown


def test_what_was_written_since_is_read_alone(tmp_path) -> None:
    """Of files that were there only what was appended, of new ones everything; nothing of one that has not changed."""

    def write(writer: str, *steps: int) -> None:
        journal = Journal(tmp_path, writer=writer, host="here", boot_id="", job="job")
        for step in steps:
            journal.emit(Event.CKPT_BEGIN, step=step)
        journal.close()

    write("rank0", 1, 2)
    write("rank1", 3)
    sizes = journal_sizes(tmp_path)
    assert read_journal(tmp_path, since=sizes).events == ()
    write("rank0", 4)
    write("rank2", 5)
    contents = read_journal(tmp_path, since=sizes)
    assert [event["step"] for event in contents.events] == [4, 5]
    assert contents.torn_lines == 0
    assert len(read_journal(tmp_path).events) == 5


def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(tmp_path, capsys) -> None:
    """Also the line of which only a part was written; it is said once, and once that it is over."""
    journal = Journal(tmp_path, writer="rank0", host="here", boot_id="", job="job")
    journal.emit(Event.CKPT_BEGIN, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 20, hard))
    try:
        journal.emit(Event.CKPT_BEGIN, step=2)
        journal.emit(Event.CKPT_BEGIN, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.emit(Event.CKPT_BEGIN, step=4)
    journal.emit(Event.CKPT_BEGIN, step=5)
    journal.close()
    contents = read_journal(tmp_path)
    assert [event["step"] for event in contents.events] == [1, 2, 3, 4, 5]
    assert contents.torn_lines == 0
    said = capsys.readouterr().err
    assert said.count("cannot write the journal") == said.count("is written again") == 1


def test_a_journal_that_was_removed_is_made_again_with_all_that_was_in_it(tmp_path) -> None:
    """Until its directory is there again, what is told meanwhile is kept, too."""
    directory = tmp_path / "journal"
    directory.mkdir()
    journal = Journal(directory, writer="rank0", host="here", boot_id="", job="job")
    journal.emit(Event.CKPT_BEGIN, step=1)
    shutil.rmtree(directory)
    journal.emit(Event.CKPT_BEGIN, step=2)
    directory.mkdir()
    journal.emit(Event.CKPT_BEGIN, step=3)
    journal.close()
    assert [event["step"] for event in read_journal(directory).events] == [1, 2, 3]


def test_a_journal_keeps_the_newest_of_what_it_cannot_write(tmp_path, capsys) -> None:
    """Memory has an end: what is dropped for it is counted, and said at the end."""
    journal = Journal(tmp_path / "none", writer="rank0", host="here", boot_id="", job="job")
    for step in range(300):
        journal.emit(Event.CKPT_BEGIN, step=step, text="x" * 10_000)
    (tmp_path / "none").mkdir()
    journal.emit(Event.CKPT_BEGIN, step=300)
    journal.close()
    steps = [event["step"] for event in read_journal(tmp_path / "none").events]
    assert steps == list(range(steps[0], 301))
    assert 0 < steps[0] < 300
    assert f"{steps[0]} events could not be written" in capsys.readouterr().err


def test_a_line_that_an_earlier_process_left_torn_takes_no_other_with_it(tmp_path) -> None:
    """A container that starts again has the host name and the process numbers of the one before, so its files."""
    facts = {"writer": "monitor", "host": "h", "boot_id": "b", "job": "j"}
    earlier = Journal(tmp_path, **facts)
    earlier.emit(Event.RUN_START)
    earlier.emit(Event.FIRST_BEAT)
    earlier.close()
    earlier.path.write_bytes(earlier.path.read_bytes()[:-20])
    journal = Journal(tmp_path, **facts)
    journal.emit(Event.RESUME, step=1)
    journal.emit(Event.RESUME, step=2)
    journal.close()
    contents = read_journal(tmp_path)
    assert [event["step"] for event in contents.events if event["event"] == "resume"] == [1, 2]
    assert (len(contents.events), contents.torn_lines) == (3, 1)


def test_kinds_of_events_are_passed_over_and_nothing_else(tmp_path) -> None:
    """Whatever the others' texts say; and who reads on later begins where the file ended."""
    journal = Journal(tmp_path, writer="monitor", host="h", boot_id="b", job="j")
    for event in (Event.RUN_START, Event.PROGRESS, Event.LOSS, Event.STEP_TIME):
        journal.emit(event, text='"event":"progress","step":', event_of={"event": "progress"})
    journal.emit(Event.PROGRESS, step=3)
    journal.close()
    whole, contents = read_journal(tmp_path), read_journal(tmp_path, without=CURVES)
    assert [event["event"] for event in contents.events] == ["run_start", "step_time"]
    assert contents.read_to == whole.read_to
    assert contents.torn_lines == 0
