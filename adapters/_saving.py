"""A loop of one's own that is also saved, resumed and ended: what the adapters of Accelerate and DeepSpeed share."""

from __future__ import annotations

import sys
from typing import Any

from resilience_sdk.adapters import pytorch
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.ranks import agreement, find_ranks
from resilience_sdk.core.console import say_once
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import finish
from resilience_sdk.rank.checkpoints import save_at_stop


class SavingLoop(pytorch.Attached):
    """An attached loop that saves between two steps; a context manager that finishes or detaches.

    For the thread that trains. Whoever is built on it resumes before the hooks are put on.
    """

    _session: Session | None
    _checkpointer: Checkpointer | None
    """None where nothing is saved."""
    _began: int
    """How many steps were complete at the start."""

    def _offer(self, loader: Any) -> None:
        """Keep it: its place is a part of what this loop saves."""

    def save(self) -> bool:
        """Save into the run directory now; tell whether a whole checkpoint of this step is there. Collective."""
        return self._checkpointer is not None and self._checkpointer.save(self.step)

    def finish(self) -> None:
        """End a training that is complete: save once more, set the finished flag, detach. Collective.

        Where ranks are at different steps, it says so, and neither saves nor sets the flag. Raises `NumericsError`
        where the last losses were bad and the setting `numerics` asks for that, and `NotSavedError` where the end could
        not be saved.
        """
        if not self.is_attached:
            return
        if self._session is not None:
            numerics.settle()  # the last losses are not judged yet, and the save is to be good
        is_one = self._save_the_end()
        self.detach()
        if self._session is not None:
            finish(self._session, self.step, is_complete=is_one)

    def _save_the_end(self) -> bool:
        """Save what was trained; tell whether all ranks are at one step, without which it would be no one's state."""
        if self._checkpointer is None:
            return True
        ranks = find_ranks()
        with agreement():
            steps = ranks.gather(self.step)
        least, most = min(steps), max(steps)
        if least == most != self._began:
            self._checkpointer.save(self.step, last=True)
        elif least != most and ranks.rank == 0:
            say_once(
                "steps differ",
                f"the end of the training is NOT SAVED: its ranks are at different steps ({least} to {most}), as "
                "behind a load of one of them alone; load alone only behind handle.finish()",
            )
        return bool(least == most)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            self.detach()  # no collective: the other ranks may be elsewhere

    def between_steps(self, is_leaving: bool) -> float:
        """Save if it is time, or the last thing before the job leaves. Collective: all ranks are behind one step."""
        own = self._checkpointer
        if is_leaving:
            self.save_before_leaving()
            return self.step
        if own is None:
            return sys.maxsize
        own.maybe_save(self.step)
        return own.next_due()

    @property
    def saves_between(self) -> bool:
        """Whether there may be something to do between two steps."""
        return self._checkpointer is not None

    def save_before_leaving(self) -> None:
        """Save if there is time. Collective."""
        if self._checkpointer is not None:
            save_at_stop(self._checkpointer, self.step, self._session)

    def expected_save_s(self) -> float:
        """Return how many seconds that save will take; 0 where that is not known."""
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_save_s
