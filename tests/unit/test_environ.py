"""Who a process is, by the variables of its launcher."""

from __future__ import annotations

import pytest

from resilience_sdk import environ


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "3"}, (3, 4)),
        ({"RANK": "3", "WORLD_SIZE": "x"}, (3, 4)),
        ({"RANK": "3", "WORLD_SIZE": "2"}, (3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "8"}, (1, 8)),
    ],
)
def test_the_world_holds_the_rank(env, expected):
    """A rank without the size of its world is in one of at least its own number: its page would be refused else."""
    identity = environ.rank_identity(env)
    assert (identity.rank, identity.world_size) == expected
