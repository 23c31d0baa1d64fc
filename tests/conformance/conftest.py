"""One launch of each probe under each launcher, shared by all tests of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import launches

# What is compared here is how workers are started; the rank page has a test of its own.
QUIET = {"RESILIENCE_DISABLE": "1"}
GUARDED = {"arguments": ["guarded.py", "--lr", "1", "two words", "ünï"], "ranks": 2}
UNGUARDED = {"arguments": ["./unguarded.py"], "ranks": 1}
MODULE = {"arguments": ["-m", "probe_package.program", "--x", "1"], "ranks": 1}
# DataLoader workers take seconds; where the script is exec'd they cannot differ from torchrun's.
LOADERS = {"PROBE_LOADERS": "1"}


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """All launches by `(probe, launcher)`."""
    plan = {("guarded", name): {**GUARDED, **QUIET, **LOADERS} for name in ("torchrun", "forkserver")}
    plan |= {("unguarded", name): {**UNGUARDED, **QUIET, **LOADERS} for name in ("torchrun", "forkserver")}
    plan |= {("module", name): {**MODULE, **QUIET} for name in ("torchrun", "forkserver")}
    plan |= {("guarded", "exec"): {**GUARDED, **QUIET}}
    folder = tmp_path_factory.mktemp("launches")
    plan["watched", "forkserver"] = {**GUARDED, "RESILIENCE_RUN_DIR": str(folder / "run")}
    return launches.launch_all(folder, plan)
