"""The way of an adapter to the proof of its loop's resumes, and to the samples of Accelerate's loaders."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from resilience_sdk.rank import Session
from resilience_sdk.rank.fingerprints import Tap, tap_of, why_unknown
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.rank.pass_print import PassPrint


def proof_of(
    session: Session | None,
    prints: PassPrint,
    optimizers: Iterable[Any],
    skipped: Callable[[], Collection[int]],
    cures: Mapping[str, str],
    per_step: int = 1,
    length: Callable[[], int] = int,
    key: str = "",
) -> LoopProof | None:
    """Return what proves the resumes of one loop; None where nothing is recorded, or that is switched off.

    `per_step`: how many batches a step has; `length()`: what `length_of` returns of the training; `key`: what tells
    one training of the program from another, beside which one it is. For the rest see `LoopProof`.
    """
    if session is None or session.settings.resume_check == "off":
        return None
    number = _proofs[session] = _proofs.get(session, 0) + 1
    prints.is_checked = True
    proof = LoopProof(session, prints, optimizers, skipped, cures, per_step)
    proof.length, proof.training = length, crc32(f"{number} {key}".encode(errors="replace"))
    return proof


_proofs: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
"""How many loops of this process have had a proof."""


def inner_loader(loader: Any) -> Any:
    """Return the loader that one of Accelerate's reads from, if its samples can be known; else None.

    Not of a `DataLoaderDispatcher`: one rank reads for all.
    """
    base = getattr(loader, "base_dataloader", None)
    is_shard = any(kind.__name__ == "DataLoaderShard" for kind in type(loader).__mro__)
    return base if is_shard and base is not None and tap_of(base) is not None else None


def printing(prints: PassPrint, loader: Any, skipping: Any = None) -> AbstractContextManager[None]:
    """Return the block in which the first batch of a pass over `loader` is read, whose samples are known from then on.

    `skipping`: what leaves out the beginning of the pass.
    """
    base = inner_loader(loader) if prints.is_checked else None
    tap = None if skipping is None or base is None else _tap_behind(skipping)
    if base is None or (skipping is not None and tap is None):
        prints.leave(_why_unknown(loader) if base is None else "the batches that are left out are not seen")
        return nullcontext()
    prints.begin(base, tap=tap)
    if tap is not None:
        return nullcontext()
    prints.forget_saved()
    return prints.tapped(base)


def _why_unknown(loader: Any) -> str:
    if any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__):
        return "one rank reads the batches for all (DataLoaderDispatcher)"
    return why_unknown(getattr(loader, "base_dataloader", loader))


def _tap_behind(skipping: Any) -> Tap | None:
    """Let what `skip_first_batches` gave draw from a tap, also what it leaves out; None where that cannot be."""
    sampler: Any = getattr(skipping, "batch_sampler", None)
    if type(sampler).__name__ != "SkipBatchSampler" or not hasattr(sampler, "batch_sampler"):
        return None
    sampler.batch_sampler = tap = Tap(sampler.batch_sampler)
    return tap
