"""The one event vocabulary: every journal line carries one of these names."""

from __future__ import annotations

from enum import Enum


class Event(str, Enum):
    """What can be journalled. Values are the contract; readers must accept names that they do not know."""

    RUN_START = "run_start"
    ATTEMPT_START = "attempt_start"
    RANK_START = "rank_start"
    FIRST_BEAT = "first_beat"
    SUSPECT = "suspect"
    STALL = "stall"
    STALL_END = "stall_end"
    CONFIRMED = "confirmed"
    DUMP = "dump"
    SIGNAL_SENT = "signal_sent"
    RANK_EXIT = "rank_exit"
    INCIDENT = "incident"
    RECOVERED = "recovered"
    DECISION = "decision"
    CKPT_BEGIN = "ckpt_begin"
    CKPT_COMMIT = "ckpt_commit"
    CKPT_FAIL = "ckpt_fail"
    CKPT_SKIP = "ckpt_skip"
    CKPT_QUARANTINE = "ckpt_quarantine"
    FRAMEWORK_CKPT = "framework_ckpt"
    RESUME = "resume"
    PREEMPT_NOTICE = "preempt_notice"
    STOP_AGREED = "stop_agreed"
    STRAGGLER = "straggler"
    NUMERICS = "numerics"
    METRICS = "metrics"
    HEALTH = "health"
    MONITOR_START = "monitor_start"
    MONITOR_REPLACED = "monitor_replaced"
    DEGRADED = "degraded"
    ATTEMPT_END = "attempt_end"
    FINISHED = "finished"
