"""Error files that a killed rank left empty or in part: torch's agent dies of them, ours does not."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from resilience_sdk.launcher.attempt import exception_from_torch
from resilience_sdk.launcher.forkserver import WorkerExit
from resilience_sdk.launcher.worker_processes import _failure


@pytest.mark.parametrize("text", ["", '{"message": {"mess', "[]", "{}"])
def test_a_torn_error_file_counts_as_none(tmp_path: Path, text: str) -> None:
    """The exit code is told, and no exception."""
    path = tmp_path / "error.json"
    path.write_text(text)
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch's own, whatever it is: the reason for ours
        ProcessFailure(1, 4242, -9, str(path))
    failure = _failure(1, WorkerExit(1, 4242, -9, 0), str(path))
    assert (failure.local_rank, failure.exitcode, failure.signal_name()) == (1, -9, "SIGKILL")
    assert exception_from_torch(path) is None
