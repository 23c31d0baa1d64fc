"""What is said of a confirmed hang."""

from __future__ import annotations

import pytest

import resilience_sdk
from resilience_sdk.monitor.hang_report import shown_frames

OURS = f"{resilience_sdk.__path__[0]}/faults.py:182 _deadlock"
TORCH = "/env/lib/python3.11/site-packages/torch/autograd/graph.py:979 _engine_run_backward"
USERS = "/home/u/resilience_sdk/train.py:30 train_step"
MAIN = "/home/u/train.py:44 main"


@pytest.mark.parametrize(
    ("stack", "shown"),
    [
        ([USERS, MAIN], [USERS, MAIN]),
        ([TORCH, TORCH, TORCH, TORCH, USERS, MAIN], [TORCH, TORCH, USERS]),
        ([OURS, OURS, OURS, USERS, MAIN], [USERS, MAIN]),
        ([TORCH, TORCH, TORCH, TORCH], [TORCH, TORCH]),
        ([OURS, OURS], [OURS, OURS]),
        ([], []),
    ],
)
def test_a_line_of_the_user_is_among_the_frames_that_are_shown(stack, shown):
    """Three frames of a library say nothing to a person who looks for a line in the script."""
    assert shown_frames(stack) == shown
