"""Requests to leave: a rank that got a signal, a file in the run directory, or the cloud asks for one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.core import console
from resilience_sdk.core.plain_file import open_plain
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.preemption.context import counts, is_request
from resilience_sdk.preemption.reasons import Asker, asker, notice_name
from resilience_sdk.recorder import page_layout as at

if TYPE_CHECKING:
    from resilience_sdk.preemption.cloud import CloudWatch

_MOST_BYTES = 16 << 10
_MOST_CHARACTERS = 200


@attrs.frozen
class LeaveRequest:
    """Somebody asks the job to leave."""

    source: str
    """What told: a signal to a rank, the file, or a service of a cloud."""
    kind: Asker
    rank: int | None = None
    """Which rank was told."""
    reason: str | None = None
    by: str | None = None
    """Who asked, as the file says it."""
    end_unix: float | None = None
    """When it happens (Unix seconds), where that was told; infinity: the ranks know it themselves."""
    incident: str | None = None
    """The incident because of which we ask for it ourselves."""
    node: str | None = None
    """The node that is to be left out then."""

    def facts(self) -> dict[str, Any]:
        """Return what is known, for the journal."""
        facts = {
            "source": self.source,
            "kind": self.kind.value,
            "rank": self.rank,
            "reason": self.reason,
            "by": self.by,
            "incident": self.incident,
            "node": self.node,
        }
        return {name: value for name, value in facts.items() if value is not None}


class Notices:
    """Looks for whoever asks this node. The monitor's only thread."""

    def __init__(self, run_dir: Path, began: float, cloud: CloudWatch | None = None) -> None:
        """`run_dir/preempt` counts if it is newer than `began` (Unix seconds); `cloud` asks a cloud for its notice."""
        self._file = run_dir / "preempt"
        self._began = began
        self._cloud = cloud
        self._own: LeaveRequest | None = None

    def ask(self, asked: LeaveRequest | None) -> None:
        """Ask from within, for the stop of a job that is too slow; None takes that back."""
        self._own = asked

    def look(self, noticed: Iterable[tuple[int, int]]) -> LeaveRequest | None:
        """Return who asks, None = nobody; `noticed`: ranks and the notices on their pages, 0 where there is none."""
        if (asked := on_page(noticed) or self._in_file()) is not None:
            return asked
        notice = self._cloud.notice() if self._cloud is not None else None
        if notice is None:
            return self._own
        return LeaveRequest(notice.source, Asker.CLOUD, reason=notice.reason, end_unix=notice.deadline_unix)

    def _in_file(self) -> LeaveRequest | None:
        """Return what the file says, be it empty: one that belongs to somebody else, or is no file, says nothing."""
        if not is_request(self._file, self._began):
            return None
        try:
            fd = open_plain(self._file, os.O_RDONLY | os.O_NOFOLLOW)
        except PermissionError:
            return LeaveRequest(self._file.name, Asker.FILE)  # root's, who says no more
        except OSError:
            return None
        with open(fd, "rb") as file:
            told = _object(file.read(_MOST_BYTES)) if counts(os.fstat(fd), self._began) else None
        if told is None:
            return None
        return LeaveRequest(self._file.name, Asker.FILE, reason=_short(told.get("reason")), by=_short(told.get("by")))


def on_page(noticed: Iterable[tuple[int, int]], kind: Asker | None = None) -> LeaveRequest | None:
    """Return whom the page of a rank says to have asked, of that kind if one is given: see `Notices.look`."""
    for rank, number in noticed:
        if number and kind in (None, asker(number)):
            # The scheduler's end is told in time for a save, however long that takes: a grace would cut it short.
            end_unix = math.inf if number == at.NOTICE_END else None
            return LeaveRequest(f"rank {rank}: {notice_name(number)}", asker(number), rank, end_unix=end_unix)
    return None


def watch_cloud(settings: Settings, journal: Path) -> CloudWatch | None:
    """Return what asks a cloud for a notice that has to be obeyed; None where there is no cloud to be asked.

    `journal` is the run directory's, where it stands which notices earlier starts have obeyed.
    """
    if settings.cloud_notices == "off":
        return None
    from resilience_sdk.preemption.cloud import CloudWatch, cloud_poller

    try:
        poller = cloud_poller(settings.cloud_notices, settings.cloud_endpoint)
    except ConfigError as error:
        console.say_once("cloud", f"no notices of the cloud: {error}")
        return None
    return CloudWatch(poller, journal, lead_s=settings.preempt_time) if poller is not None else None


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(text: object) -> str | None:
    flat = " ".join(console.printable(text).split()) if isinstance(text, str) else ""
    return flat[:_MOST_CHARACTERS] or None
