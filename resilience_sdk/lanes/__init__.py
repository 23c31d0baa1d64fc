"""Timed blocks on the rank page: the engine under `heartbeat()` and `straggler.section()`.

`blocks` are what is entered and left, `recorder` knows which thread writes where, `lookup` finds the block of a
name and starts the recording at first use.
"""

from resilience_sdk.lanes.blocks import Amounts, Beat, Block, Pulse
from resilience_sdk.lanes.lookup import (
    BEATS,
    BLOCKS,
    NO_BLOCK,
    TELLERS,
    AnyBlock,
    NoBlock,
    Unstarted,
    decorate,
    disable,
    find_beat,
    find_block,
    find_own_beat,
    find_own_block,
    forget,
    recorder,
    set_starter,
    starter,
)
from resilience_sdk.lanes.recorder import Lane, Recorder

__all__ = [
    "BEATS",
    "BLOCKS",
    "NO_BLOCK",
    "TELLERS",
    "Amounts",
    "AnyBlock",
    "Beat",
    "Block",
    "Lane",
    "NoBlock",
    "Pulse",
    "Recorder",
    "Unstarted",
    "decorate",
    "disable",
    "find_beat",
    "find_block",
    "find_own_beat",
    "find_own_block",
    "forget",
    "recorder",
    "set_starter",
    "starter",
]
