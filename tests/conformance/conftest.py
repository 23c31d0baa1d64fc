"""One launch of each probe under each launcher, made when the first test asks for it."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import launches

# What is compared here is how workers are started; the rank page has a test of its own.
QUIET = {"RESILIENCE_DISABLE": "1"}
GUARDED = {"arguments": ["guarded.py", "--lr", "1", "two words", "ünï"], "ranks": 2}
UNGUARDED = {"arguments": ["./unguarded.py"], "ranks": 1}
PROBES = {
    "guarded": GUARDED | QUIET,
    "unguarded": UNGUARDED | QUIET | {"PROBE_LOADERS": "fork"},
    "module": {"arguments": ["-m", "probe_package.program", "--x", "1"], "ranks": 1} | QUIET,
    "watched": GUARDED,
    # DataLoader workers take seconds; where the script is exec'd they cannot differ from torchrun's.
    "guarded-loaders": GUARDED | QUIET | {"PROBE_LOADERS": "all"},
    "unguarded-loaders": UNGUARDED | QUIET | {"PROBE_LOADERS": "all"},
}


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """Return the function from a probe and names of launchers to their launches; each is made once."""
    folder = tmp_path_factory.mktemp("launches")
    made = {}
    # Under nohup this is ignored: torchrun, which handles it, gives its workers the default again, we keep it ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def launched(probe, *names):
        plan = {(probe, name): PROBES[probe] for name in names if (probe, name) not in made}
        made.update(launches.launch_all(folder, plan))
        return [made[probe, name] for name in names]

    yield launched
    signal.signal(signal.SIGHUP, before)
