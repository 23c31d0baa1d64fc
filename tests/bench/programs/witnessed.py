"""Prints, as JSON, the nanoseconds that fingerprints and witnesses add to a step, and those of digests."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from resilience_sdk.checkpoint.digests import of_rank
from resilience_sdk.checkpoint.state import capture_rng
from resilience_sdk.rank.data import Walk
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.recorder.witness_ring import WitnessRing

STEPS = 400


def images(size: int) -> Any:
    return [torch.rand(size, 3, 64, 64), torch.arange(size)]


BATCHES = {
    "64 images": (64, images(64)),
    "4096 rows": (4096, {"rows": torch.rand(4096, 32), "labels": torch.arange(4096)}),
    "8 texts": (
        8,
        {name: torch.zeros(8, 512, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")},
    ),
}


class Given:
    """Data that cost nothing: a batch that is there."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, _: list[int]) -> Any:
        return self.batch


def added(folder: Path, size: int, batch: Any) -> float:
    """Return what one step takes more with all of it than without, in nanoseconds."""
    optimizer = torch.optim.AdamW([{"params": torch.nn.Parameter(torch.zeros(1))} for _ in range(2)])
    took = []
    for is_on in (False, True):
        loader = DataLoader(
            Given(batch, size * STEPS), size, sampler=range(size * STEPS), collate_fn=lambda found: found
        )
        walk = Walk()
        walk.prints.is_checked = is_on
        path = folder / "a0-r0-1.witness"
        path.unlink(missing_ok=True)
        ring = WitnessRing(path, rank=0, world_size=1, attempt=0, facts=0)
        session: Any = SimpleNamespace(
            make_witness_ring=lambda _, ring=ring: ring,
            find_witnesses=lambda: None,
            identity=SimpleNamespace(world_size=1),
            journal=None,
        )
        proof = LoopProof(session, walk.prints, [optimizer], tuple)
        batches = walk.start_epoch(loader, lambda: None, is_speaker=False)
        for step in range(10):  # with those behind a save
            proof.note(step, 0, step, next(batches))
        began_ns = time.thread_time_ns()
        for step in range(10, STEPS):
            found = next(batches)
            if is_on:
                proof.note(step, 0, step, found)
        took.append((time.thread_time_ns() - began_ns) / (STEPS - 10))
    return took[1] - took[0]


def digests(state: dict[str, Any]) -> float:
    """Return what the digests of a state take, in nanoseconds."""
    began_ns = time.thread_time_ns()
    of_rank({"rng": capture_rng(), "position": {"epoch": 1, "batches": 2}}, {}, {"model": state}, "{}")
    return float(time.thread_time_ns() - began_ns)


def main(repeats: int) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    state = {str(number): torch.zeros(64, 64) for number in range(3000)}
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            name: [added(Path(folder), size, batch) for _ in range(repeats)] for name, (size, batch) in BATCHES.items()
        }
    print(json.dumps({"steps": steps, "digests": [digests(state) for _ in range(repeats)]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
