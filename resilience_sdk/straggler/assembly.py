"""From windows of single ranks to those of a node, and from those of nodes to windows over all of them. Pure.

Who is late is waited for, but not for long: a rank that is dead, slow to report or has no such section must not keep
the others from being judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import attrs

from resilience_sdk.straggler.cutting import Section

PATIENCE = 3
"""So many windows of a section may be waiting for somebody; then the oldest is taken without."""

Part = TypeVar("Part")


@attrs.define
class _Pending(Generic[Part]):
    parts: dict[int, dict[int, Part]] = attrs.field(factory=dict)
    newest: dict[int, int] = attrs.field(factory=dict)
    """Of those that are waited for, the number of the last window; -1: there was none."""
    done: int = -1


class Assembly(Generic[Part]):
    """Gathers the parts of windows, by section and number; whose part it is, a number tells (a rank, or a node)."""

    def __init__(self, members: Iterable[int], *, realign: bool = False) -> None:
        """Wait for `members` first. `realign`: count anew for one that has fallen behind, as who began again has.

        Then its next window is taken for the one that comes next for the others.
        """
        self._members = set(members)
        self._realign = realign
        self._shift: dict[tuple[int, Section], int] = {}
        self._sections: dict[Section, _Pending[Part]] = {}

    def expect(self, member: int) -> None:
        """Wait for this one too, in sections that begin from now on."""
        self._members.add(member)

    def forget(self, member: int) -> None:
        """Wait for one no more: it is gone, or begins anew."""
        self._members.discard(member)
        self._shift = {key: shift for key, shift in self._shift.items() if key[0] != member}
        for pending in self._sections.values():
            pending.newest.pop(member, None)

    def offer(self, member: int, section: Section, index: int, part: Part) -> None:
        """Take a part of one window; where it comes too late it is dropped."""
        pending = self._sections.get(section)
        if pending is None:
            pending = self._sections[section] = _Pending(newest=dict.fromkeys(self._members, -1))
        index += self._shift.get((member, section), 0)
        if index <= pending.done:
            if not self._realign:
                return
            behind = 1 + pending.done - index
            self._shift[member, section] = self._shift.get((member, section), 0) + behind
            index += behind
        pending.parts.setdefault(index, {})[member] = part
        pending.newest[member] = max(index, pending.newest.get(member, -1))

    def take(self) -> list[tuple[Section, int, dict[int, Part]]]:
        """Return the windows that are complete, or can wait no more, oldest first."""
        ready = []
        for section, pending in self._sections.items():
            for index in sorted(pending.parts):
                behind = [member for member, newest in pending.newest.items() if newest < index]
                if behind and len(pending.parts) <= PATIENCE:
                    break
                for member in behind:
                    del pending.newest[member]
                ready.append((section, index, pending.parts.pop(index)))
                pending.done = index
        return ready
