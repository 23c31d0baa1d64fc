"""What a rank leaves behind: DataLoader workers and helpers that live in its session after it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping

from resilience_sdk.hostinfo import stat_fields

_ROUNDS = 5  # a member may fork while we kill


def kill_members(leaders: Mapping[int, int | None]) -> None:
    """SIGKILL all processes in the sessions or groups led by these pids (mapped to their start ticks).

    A process that began before the leader did is none of its children, so a recycled pid is left alone.
    Where /proc cannot tell, the whole group is signalled.
    """
    for _ in range(_ROUNDS):
        members = _members(leaders)
        if members is None:
            for leader in leaders:
                with contextlib.suppress(OSError):
                    os.killpg(leader, signal.SIGKILL)
            return
        if not members:
            return
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def any_left(leader: int, born: int | None) -> bool:
    """Tell whether a process other than `leader` lives in the session or group that it led; False if unknown."""
    return bool(_members({leader: born}))


def _members(leaders: Mapping[int, int | None]) -> list[int] | None:
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    own = os.getpid()
    members = []
    for pid in pids:
        fields = stat_fields(pid)
        if not fields or pid == own or fields[0] in "ZX":
            continue
        for leader in {int(fields[2]), int(fields[3])} & leaders.keys():
            born = leaders[leader]
            if pid != leader and (born is None or int(fields[19]) >= born):
                members.append(pid)
                break
    return members
