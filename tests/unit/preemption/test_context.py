"""What the session gives to who listens."""

import os
import time

from resilience_sdk.preemption.context import is_request


def test_a_file_of_the_first_moment_asks_this_job_and_an_older_one_does_not(tmp_path):
    """Times of files go by ticks of the kernel and may be behind the clock that says when the job began."""
    for number in range(300):
        began = time.time()
        path = tmp_path / str(number)
        path.touch()
        assert is_request(path, began)
        os.utime(path, (began - 1, began - 1))
        assert not is_request(path, began)
    assert not is_request(tmp_path / "none", 0.0)
