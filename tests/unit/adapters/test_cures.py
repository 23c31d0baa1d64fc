"""The cures of a difference are those of the framework that is there."""

import pytest

from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters.accelerate import attached as accelerate
from resilience_sdk.adapters.deepspeed import proof as deepspeed
from resilience_sdk.adapters.lightning import proof as lightning
from resilience_sdk.adapters.megatron import proof as megatron
from resilience_sdk.adapters.transformers import proof as transformers
from resilience_sdk.rank.repeated import CURES

OWN = {
    "pytorch": pytorch._CURES,
    "accelerate": accelerate._CURES,
    "deepspeed": deepspeed._CURES,
    "lightning": lightning._CURES,
    "megatron": megatron.CURES,
    "pretrain": megatron.PRETRAIN_CURES,
    "transformers": transformers._CURES,
}


@pytest.mark.parametrize("way", OWN)
def test_each_way_in_has_a_cure_of_its_own_for_each_difference(way):
    """None speaks of the `state` of start_run, which its users do not have."""
    assert set(OWN[way]) == set(CURES)
    assert not set(OWN[way].values()) & set(CURES.values())
