from __future__ import annotations

import torch.distributed.checkpoint as dcp

from resilience_sdk.checkpoint.ranks import Alone
from resilience_sdk.checkpoint.sharded import _group


class Two(Alone):
    size = 2
    group = "a gloo group"


def test_one_rank_needs_nobody_where_torch_can_be_told_so():
    """Older versions have no such argument: they find out by themselves, and would fail with it."""

    def older(state_dict, *, process_group=None):
        raise AssertionError("only looked at")

    assert _group(Alone(), older) == {}
    assert _group(Alone(), dcp.save) == _group(Alone(), dcp.load) == {"no_dist": True}
    assert _group(Two(), older) == {"process_group": "a gloo group"}
