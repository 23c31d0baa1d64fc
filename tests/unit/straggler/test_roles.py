"""What a rank says that it does."""

from __future__ import annotations

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler import set_role
from resilience_sdk.straggler.workload import ROLE_SUFFIX, read_role


def test_a_role_is_read_back_by_the_monitor(recording):
    """Beside the page, so that the monitor finds it; None where nothing was said."""
    stem = recording.page.path.with_suffix("")
    assert read_role(stem) is None
    set_role("stage-1")
    assert read_role(stem) == "stage-1"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, None, 3, "ä"])
def test_what_is_no_name_is_refused(recording, name):
    """With what is expected."""
    with pytest.raises(ConfigError, match="set_role"):
        set_role(name)


def test_a_file_with_anything_else_is_no_role(recording):
    """What stands there is distrusted."""
    recording.page.path.with_suffix(ROLE_SUFFIX).write_bytes(b"\xff\x00 evil\n")
    assert read_role(recording.page.path.with_suffix("")) is None
