import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VARIANTS = ["plain", "workers", "ddp"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """All variants of the program in one process, which imports torch once: `(results, what was said)`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RESIL"))}
    env["PYTHONPATH"] = str(HERE.parents[1])
    root = tmp_path_factory.mktemp("training")
    program = [sys.executable, str(HERE / "resumed_training.py"), str(root), *VARIANTS]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stderr.split("variant ")[1:])
    return json.loads(done.stdout.splitlines()[-1]), said


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_and_resumed_run_reaches_the_same_loss_bit_for_bit(outcome, variant):
    """Shuffled, augmented data, dropout, batch norm: after SIGKILL and resume, each loss is the undisturbed one.

    With the data read by the process itself, by workers, and by two DDP ranks; the resume falls into the
    middle of an epoch. The flag `finished` appears when all ranks have ended, and not before.
    """
    result, said = outcome[0][variant], outcome[1][variant]
    ranks, total, killed_at, resumed_at = (2, 15, 8, 6) if variant == "ddp" else (1, 30, 13, 12)
    assert result["reference"]["codes"] == result["resumed"]["codes"] == [0] * ranks, said
    assert -9 in result["killed"]["codes"]
    done = [len(result["killed"]["lines"][rank]) for rank in range(ranks)]
    assert max(done) == killed_at + 1, said
    assert min(done) >= killed_at, said  # a rank may lose the other in that step
    for rank in range(ranks):
        reference = result["reference"]["lines"][rank]
        assert [line[0] for line in reference] == list(range(total))
        assert result["killed"]["lines"][rank] == reference[: done[rank]]
        assert result["resumed"]["lines"][rank] == reference[resumed_at:]
    assert [result[phase]["finished"] for phase in ("reference", "killed", "resumed")] == [True, False, True]
    assert said.count("again, to go on behind them") == 1
