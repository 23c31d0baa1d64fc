"""The write-once words of an attempt: proposals and decisions, in the job's private page directory.

A word is a symbolic link, because making one is a single step that either wins or finds the winner, content included.
On one node whoever asks for a word makes it. With several nodes it becomes what it is in the store of the rendezvous:
who wants a word leaves a wish, our launcher carries it there and makes the link from what stands (`launcher.board`).
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from resilience_sdk.job_config import WISH, WORD
from resilience_sdk.preemption.protocol import Decision, Proposal


class Words:
    """The words of one attempt, as this node knows them. All methods raise OSError, and ValueError for a strange word.

    Any process of the job, any thread.
    """

    def __init__(self, pages: Path, attempt: int) -> None:
        """Use the words in `pages`; our launcher has said there how many nodes the attempt has."""
        self._pages = pages
        self._attempt = attempt
        self.shared = _nodes(pages, attempt) > 1

    def decision(self, round_: int) -> Decision | None:
        """Return what was decided in a round, or None as long as nothing is."""
        found = read_link(word_path(self._pages, self._attempt, f"stop-{round_}"))
        return None if found is None else Decision(found)

    def proposal(self, round_: int) -> Proposal | None:
        """Return what was proposed in a round, or None as long as nothing is."""
        found = read_link(word_path(self._pages, self._attempt, f"plan-{round_}"))
        return None if found is None else Proposal(round_, int(found))

    def propose(self, proposal: Proposal) -> None:
        """Ask for a proposal; what stands then is what anybody asked for first."""
        self._ask(f"plan-{proposal.round}", str(proposal.at))

    def decide(self, round_: int, wanted: Decision) -> Decision | None:
        """Ask for a decision, and return the one that stands, if that is known yet."""
        self._ask(f"stop-{round_}", wanted.value)
        return self.decision(round_)

    def decide_alone(self, round_: int) -> bool:
        """Decide for this node only, unless what was decided is known by now; return whether this did it."""
        return make_link(word_path(self._pages, self._attempt, f"stop-{round_}"), Decision.ALONE.value)

    def _ask(self, name: str, value: str) -> None:
        make = wish_path if self.shared else word_path
        make_link(make(self._pages, self._attempt, name), value)


def word_path(pages: Path, attempt: int, name: str) -> Path:
    """Return where a word stands once it does."""
    return pages / f"{WORD}{attempt}-{name}"


def wish_path(pages: Path, attempt: int, name: str) -> Path:
    """Return where a wish for a word is left for the launcher."""
    return pages / f"{WISH}{attempt}-{name}"


def make_link(path: Path, value: str) -> bool:
    """Write a word unless there is one; return whether it was this one. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.symlink(value, path)
        return True
    return False


def read_link(path: Path) -> str | None:
    """Return a word, or None as long as there is none. Raises OSError."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return None


def _nodes(pages: Path, attempt: int) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((pages / f"attempt-{attempt}.json").read_bytes())["nodes"])
    return 1  # not started by our launcher
