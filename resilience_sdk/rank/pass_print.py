"""The fingerprint of the pass over a loader that is under way, and its comparison with one that was saved."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from resilience_sdk.core.resume_proof import ResumeCheck
from resilience_sdk.rank import fingerprints
from resilience_sdk.rank.fingerprints import EpochPrint, Tap


class PassPrint:
    """What is known of the samples of a pass, batch by batch; of the thread that trains.

    Never raises: a loader or a batch that cannot be looked at has no fingerprint.
    """

    def __init__(self) -> None:
        """Know of no pass yet."""
        self.is_checked = False
        """Whether batches have a fingerprint, which is compared where they are read again."""
        self.told: Callable[[ResumeCheck], None] = _tell_nobody
        """Takes what comes out of that."""
        self.newest_order: int | None = None
        """A number for the samples of the newest batch; None where nobody knows them."""
        self._print: EpochPrint | None = None
        self._of_pass: EpochPrint | None = None
        """What a pass that was begun before would have, whose samples nobody knows."""
        self._saved: EpochPrint | None = None
        self._tap: Tap | None = None

    # -- what a checkpoint holds of it

    def to_json(self, batches: int) -> dict[str, Any] | None:
        """Return it as of so many batches; None where that is not known."""
        # Restored, and not gone on with yet: it is as it was.
        known = self._print if self._saved is None else self._saved
        return None if known is None else known.to_json(batches)

    def resume(self, saved: Mapping[str, Any] | None, batches: int) -> None:
        """Keep what `to_json` gave as of so many batches, for `compare`; None: nothing is compared."""
        self._saved = EpochPrint.resumed(saved, batches)

    def forget_saved(self) -> None:
        """Compare nothing more with what was saved."""
        self._saved = None

    def leave(self) -> None:
        """Be between two passes."""
        self._print = self._of_pass = self._saved = None

    # -- a pass

    def begin(self, loader: Any, *, has_state: bool = False, tap: Tap | None = None) -> None:
        """Begin the fingerprint of a pass over `loader`; one that `has_state` goes back by itself, and has none.

        `tap`: what the samples of this pass are drawn from.
        """
        self._print = self._of_pass = self.newest_order = None
        if self.is_checked and not has_state:
            try:
                if tap is not None:
                    self._tap = tap
                elif self._tap is None or not self._tap.is_of(loader):  # workers that persist draw on from the first
                    self._tap = fingerprints.tap_of(loader)
                if fingerprints.repeats(loader, self._tap):
                    self._print = fingerprints.new_print(loader, self._tap)
            except Exception:  # noqa: BLE001 - a loader of somebody else's kind
                self._tap = None

    def tapped(self, loader: Any) -> AbstractContextManager[None]:
        """Return the block in which the iterator of this pass is made."""
        is_its = self._print is not None and self._tap is not None and self._tap.is_of(loader)
        return fingerprints.tapped(loader, self._tap if is_its else None)

    def make(self, loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass over a loader, also over one with a state, and return its new iterator."""
        self.begin(loader)
        with self.tapped(loader):
            batches = make()
        if self.is_checked and not self.is_known:
            with suppress(Exception):  # an iterator of somebody else's kind
                tap = fingerprints.tap_of_iterator(batches)
                if tap is not None:
                    self.begin(loader, tap=tap)
                    tap.is_on = self.is_known
        return batches

    def begun_before(self, loader: Any, batches: Any) -> None:
        """Be in a pass whose iterator was made before: its samples are known from now on where it draws them itself.

        `batches`: that iterator, None where it is not known.
        """
        self.leave()
        if not self.is_checked:
            return
        with suppress(Exception):  # of somebody else's kind
            tap = fingerprints.tap_of_iterator(batches, "_SingleProcessDataLoaderIter")
            if tap is not None:
                self.begin(loader, tap=tap)
                tap.is_on = self.is_known
            elif fingerprints.repeats(loader, Tap(None)):
                self._of_pass = fingerprints.new_print(loader, Tap(None))

    def note(self, batch: Any) -> None:
        """Take the next batch of the pass."""
        self.newest_order = None
        if self._print is None:
            if self._tap is not None and self._tap.is_on:
                self._tap.stop()  # nobody takes out what it has drawn
            return
        if self._tap is None:
            try:
                shapes, content = fingerprints.print_of_content(batch)
            except Exception:  # noqa: BLE001 - a batch of somebody else's kind
                self._print = None
                return
            self._print.add(shapes << 32 | content)
        elif self._tap.drawn:
            self.newest_order = self._tap.drawn.popleft()
            self._print.add(self.newest_order)
        else:
            self._print = None  # it does not draw from the tap after all

    def leave_out(self, batches: int) -> None:
        """Take so many batches of the pass whose samples were drawn again, and which were not read."""
        if self._print is None or self._tap is None or len(self._tap.drawn) < batches:
            self._print = None
            return
        for _ in range(batches):
            self._print.add(self._tap.drawn.popleft())

    @property
    def is_known(self) -> bool:
        """Whether this pass has a fingerprint."""
        return self._print is not None

    @property
    def facts(self) -> int:
        """A number for what has to be alike for two passes over the data to be compared."""
        known = self._print or self._of_pass
        return 0 if known is None else crc32(repr((known.kind, sorted(known.facts.items()))).encode())

    @property
    def is_fixed(self) -> bool:
        """Whether each pass gives out the same batches."""
        return self._print is not None and self._print.kind == fingerprints.CONTENT

    def compare(self, epoch: int, loader: Any) -> None:
        """Compare the batches that were read again with the saved fingerprint, and tell what came out of it."""
        saved, self._saved = self._saved, None
        with suppress(Exception):  # of a loader of somebody else's kind
            check = fingerprints.order_check(saved, self._print, epoch, loader)
            if check is not None and self.is_checked:
                self.told(check)


def _tell_nobody(_: ResumeCheck) -> None:
    """Take the result of a check that nobody wants."""
