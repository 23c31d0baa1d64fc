"""The fingerprint of the pass over a loader that is under way, and its comparison with one that was saved."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from resilience_sdk.core.resume_proof import NOT_COMPARED, ORDER, ResumeCheck
from resilience_sdk.rank import fingerprints
from resilience_sdk.rank.fingerprints import EpochPrint, Tap, in_words

UNSEEN = "no pass over the loader was seen from its first batch on"


_NONE = (0, (0, 0))


class PassPrint:
    """What is known of the samples of a pass, batch by batch; of the thread that trains.

    Never raises: a loader or a batch that cannot be looked at has no fingerprint, and the error is `why`.
    """

    def __init__(self) -> None:
        """Know of no pass yet."""
        self.is_checked = False
        """Whether batches have a fingerprint, which is compared where they are read again."""
        self.told: Callable[[ResumeCheck], None] = _tell_nobody
        """Takes what comes out of that."""
        self.why = UNSEEN
        """Why the samples of this pass are not known, where they are not."""
        self.newest_order: int | None = None
        """A number for the samples of the newest batch; None where nobody knows them."""
        self._print: EpochPrint | None = None
        self._of_pass: EpochPrint | None = None
        """What a pass that was begun before would have, whose samples nobody knows."""
        self._saved: EpochPrint | None = None
        self._tap: Tap | None = None
        self._newest = _NONE
        """The newest batch by its `id`, which is alive until it was trained, and its content."""

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

    def leave(self, why: str = UNSEEN) -> None:
        """Be between two passes, or in one whose samples are not known; `why` that is so."""
        self._print = self._of_pass = self._saved = None
        self.why = why

    # -- a pass

    def begin(self, loader: Any, *, has_state: bool = False, tap: Tap | None = None) -> None:
        """Begin the fingerprint of a pass over `loader`; one that `has_state` goes back by itself, and has none.

        `tap`: what the samples of this pass are drawn from.
        """
        self._print = self._of_pass = self.newest_order = None
        if self.is_checked:
            try:
                if has_state:
                    self.why = fingerprints.why_unknown(loader)
                    return
                if tap is not None:
                    self._tap = tap
                elif self._tap is None or not self._tap.is_of(loader):  # workers that persist draw on from the first
                    self._tap = fingerprints.tap_of(loader)
                self._know(loader, self._tap)
            except Exception as error:  # noqa: BLE001 - a loader of somebody else's kind
                self._tap = None
                self._lose(f"the loader could not be looked at: {in_words(error)}")

    def _know(self, loader: Any, tap: Tap | None) -> None:
        why = fingerprints.why_not_repeated(loader, tap)
        is_read_alike = tap is None and fingerprints.in_order(loader)  # whose values alone are seen
        self._print = fingerprints.new_print(loader, tap) if why is None or is_read_alike else None
        self.why = why or self.why

    def _lose(self, why: str) -> None:
        self._print, self.why = None, why

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
            try:
                tap = fingerprints.tap_of_iterator(batches)
                if tap is not None:
                    self.begin(loader, tap=tap)
                    tap.is_on = self.is_known
            except Exception as error:  # noqa: BLE001 - an iterator of somebody else's kind
                self._lose(f"the iterator of the loader could not be looked at: {in_words(error)}")
        return batches

    def begun_before(self, loader: Any, batches: Any) -> None:
        """Be in a pass whose iterator was made before: its samples are known from now on where it draws them itself.

        `batches`: that iterator, None where it is not known.
        """
        self.leave()
        if not self.is_checked:
            return
        try:
            tap = fingerprints.tap_of_iterator(batches, "_SingleProcessDataLoaderIter")
            if tap is not None:
                self.begin(loader, tap=tap)
                tap.is_on = self.is_known
                return
            unseen = "the iterator of this pass was made before it could be seen what its workers are given"
            self.why = fingerprints.why_not_repeated(loader, Tap(None)) or unseen
            if self.why is unseen:
                self._of_pass = fingerprints.new_print(loader, Tap(None))
        except Exception as error:  # noqa: BLE001 - of somebody else's kind
            self._lose(f"the loader could not be looked at: {in_words(error)}")

    def note(self, batch: Any) -> None:
        """Take the next batch of the pass."""
        self.newest_order = None
        if self._print is None:
            if self._tap is not None and self._tap.is_on:
                self._tap.stop()  # nobody takes out what it has drawn
            return
        if self._tap is None:
            try:
                shapes, content = print_of_newest = fingerprints.print_of_content(batch)
            except Exception as error:  # noqa: BLE001 - a batch of somebody else's kind
                self._lose(f"a batch could not be looked at: {in_words(error)}")
                return
            self._print.add(shapes << 32 | content)
            self._newest = id(batch), print_of_newest
        elif self._tap.drawn:
            self.newest_order = self._tap.drawn.popleft()
            self._print.add(self.newest_order)
        else:
            self._lose("the loader gives more batches than were drawn of its sampler")

    def content_of(self, batch: Any) -> tuple[int, int]:
        """Return what `print_of_content` does: what was looked at of the newest batch is not looked at twice."""
        (known, found), self._newest = self._newest, _NONE
        return found if known == id(batch) else fingerprints.print_of_content(batch)

    def leave_out(self, batches: int) -> None:
        """Take so many batches of the pass whose samples were drawn again, and which were not read."""
        if self._print is None:
            return
        drawn = 0 if self._tap is None else len(self._tap.drawn)
        if self._tap is None or drawn < batches:
            self._lose(f"{drawn} of the {batches} batches before the place were drawn again")
            return
        for _ in range(batches):
            self._print.add(self._tap.drawn.popleft())

    @property
    def is_known(self) -> bool:
        """Whether this pass has a fingerprint that another one of the same epoch has to be equal to."""
        return self._print is not None and self._print.kind != fingerprints.UNSEEN

    @property
    def is_noted(self) -> bool:
        """Whether the batches of this pass are to be noted."""
        return self._print is not None

    @property
    def facts(self) -> int:
        """A number for what has to be alike for two passes over the data to be compared."""
        known = self._print or self._of_pass
        if known is None or known.kind == fingerprints.UNSEEN:
            return 0
        return crc32(repr((known.kind, sorted(known.facts.items()))).encode())

    @property
    def is_fixed(self) -> bool:
        """Whether each pass gives out the same batches."""
        return self._print is not None and self._print.kind == fingerprints.CONTENT

    def compare(self, epoch: int, loader: Any) -> None:
        """Compare the batches that were read again with the saved fingerprint, and tell what came out of it."""
        saved, self._saved = self._saved, None
        try:
            check = fingerprints.order_check(saved, self._print, epoch, loader, self.why)
        except Exception as error:  # noqa: BLE001 - a loader of somebody else's kind
            why = f"the loader could not be looked at: {in_words(error)}"
            check = ResumeCheck(ORDER, NOT_COMPARED, why)
        if check is not None and self.is_checked:
            with suppress(Exception):  # of who takes it
                self.told(check)


def _tell_nobody(_: ResumeCheck) -> None:
    """Take the result of a check that nobody wants."""
