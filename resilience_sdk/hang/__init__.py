"""Hang analysis: pure functions from what was seen of the ranks to deadlines, verdicts and culprits.

`deadlines` learns how long things take, `judge` decides whether the job hangs, `ladder` says who is to blame,
`flight` and `stacks` read the evidence. Nothing here does I/O, looks at a clock or imports torch.
"""

from resilience_sdk.hang.deadlines import OUT_OF_SECTION, STARTUP, DeadlineBook, Limit
from resilience_sdk.hang.flight import FlightRecord, parse_flight_record
from resilience_sdk.hang.gaps import GapWatch
from resilience_sdk.hang.judge import Confirmation, Judgement, Suspect, judge, standing
from resilience_sdk.hang.ladder import CulpritFinding, find_culprits
from resilience_sdk.hang.stacks import (
    ThreadStack,
    busy_with,
    is_in_collective,
    main_frames,
    parse_faulthandler,
)
from resilience_sdk.hang.states import CollectivePosition, RankState

__all__ = [
    "OUT_OF_SECTION",
    "STARTUP",
    "CollectivePosition",
    "Confirmation",
    "CulpritFinding",
    "DeadlineBook",
    "FlightRecord",
    "GapWatch",
    "Judgement",
    "Limit",
    "RankState",
    "Suspect",
    "ThreadStack",
    "busy_with",
    "find_culprits",
    "is_in_collective",
    "judge",
    "main_frames",
    "parse_faulthandler",
    "parse_flight_record",
    "standing",
]
