"""The journal is as private as the run."""

from __future__ import annotations

import stat

import pytest

from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.run_directory import RunDirectory


@pytest.mark.parametrize(("group_readable", "mode"), [(False, 0o600), (True, 0o640)])
def test_the_group_reads_the_journal_of_a_run_that_it_may_read(tmp_path, group_readable, mode):
    """`resilience status` and `why` of a colleague need the journal as well as the directory."""
    run = RunDirectory.create(tmp_path / "run", group_readable=group_readable)
    journal = Journal(run.journal, writer="rank0", host="here", boot_id="", job="job")
    journal.emit(Event.RUN_START)
    journal.close()
    assert stat.S_IMODE(journal.path.stat().st_mode) == mode
