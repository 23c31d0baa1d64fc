"""Each extra brings what it is for: tried in processes that have the packages of that extra alone, and without them.

The packages are those of this environment. What an extra does not declare, directly or through another package, is not
to be found in such a process; that it is here for another extra, or for the tests, does not help.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from needed import missing
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow
OURS = "resilience-sdk"
_NOT_OF_USERS = ("docs", "test")
# Before each program: what is hidden is not found, by whatever name of it is asked for.
_ALONE = """
import sys
from importlib.machinery import PathFinder
hidden, names = frozenset({hidden!r}), frozenset({names!r})
class Alone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, *context):
        return (one for one in super().find_distributions(*context) if one.name in names)
sys.meta_path[:] = [Alone if finder is PathFinder else finder for finder in sys.meta_path]
"""
_MODEL = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
_SINK = """
from pathlib import Path
from resilience_sdk.core.settings import load_settings
from resilience_sdk.telemetry.sinks import wanted_sinks
from resilience_sdk.telemetry.sinks.base import TelemetryOrigin
from resilience_sdk.telemetry.tail import Live
here = Path.cwd()
place = TelemetryOrigin(here, "node", Live(here, None, {{}}), here, 1.0)
settings = load_settings(arguments={{"event_log": "off", {setting!r}: {value!r}}}, strict_env=False)
sink, = wanted_sinks(settings, place)
sink.open()
sink.close()
"""
_COMMAND = """
from resilience_sdk.cli.main import main
sys.exit(main({words!r}))
"""
USES = {
    "data": "from torchdata.stateful_dataloader import StatefulDataLoader as it; it([1, 2]).state_dict()",
    "accelerate": f"""{_MODEL}
from accelerate import Accelerator
from resilience_sdk.adapters import accelerate
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
accelerate.attach(accelerator, save=False).detach()
""",
    "deepspeed": """
from resilience_sdk.adapters import deepspeed
from resilience_sdk.errors import ConfigError
try:
    deepspeed.attach(object())
except ConfigError as error:
    assert "deepspeed.initialize()" in str(error), error
else:
    raise AssertionError
""",
    "lightning": "from resilience_sdk.adapters.lightning import ResilienceCallback as it; it(save=False)",
    "megatron": f"""{_MODEL}
from types import SimpleNamespace
from resilience_sdk.adapters import megatron
megatron.attach(SimpleNamespace(timers=None), optimizer).detach()
""",
    "transformers": "from resilience_sdk.adapters.transformers import ResilienceCallback as it; it()",
    "prometheus": _SINK.format(setting="prometheus_address", value="127.0.0.1:0"),
    "otel": _SINK.format(setting="otlp_endpoint", value="http://127.0.0.1:9"),
    "tensorboard": _SINK.format(setting="tensorboard_dir", value="curves"),
    "wandb": _SINK.format(setting="wandb_project", value="tried"),
    "mlflow": _SINK.format(setting="mlflow_uri", value="file:tried"),
    "top": _COMMAND.format(words=["top", "--once", "."]),
    "history": _COMMAND.format(words=["history", "index", ".", "--db", "history.db"]),
    "postgres": "from resilience_sdk.history import schema; schema.open_engine('postgresql://nobody@127.0.0.1/none')",
    "report": _COMMAND.format(words=["report", "."]),
    "dashboard": """
from resilience_sdk.cli import dashboard
dashboard._check_extra()
from resilience_sdk.dashboard import app
""",
}


@cache
def modules() -> dict[str, frozenset[str]]:
    """Return the distributions that bring each module, by their names on an index."""
    owners = metadata.packages_distributions()
    return {module: frozenset(map(canonicalize_name, those)) for module, those in owners.items()}


def declared(extra: str | None) -> set[str]:
    """Return the distributions that are installed with us and `extra`, those that they need too."""
    found: set[str] = set()
    waiting = [(OURS, frozenset({extra} if extra else ()))]
    while waiting:
        name, extras = waiting.pop()
        for text in metadata.requires(name) or ():
            asked = Requirement(text)
            applies = asked.marker is None or any(asked.marker.evaluate({"extra": one}) for one in (extras or {""}))
            own = canonicalize_name(asked.name)
            if applies and own not in found:
                try:
                    metadata.distribution(own)
                except metadata.PackageNotFoundError:
                    if name == OURS:
                        missing(f"{own} of the extra {extra} is not installed")
                    continue
                found.add(own)
                waiting.append((own, frozenset(asked.extras)))
    return found


def run(program: str, with_extra: str | None, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in `where`, with the packages that an extra brings and no others."""
    (where / "journal").mkdir()  # a run directory, for what reads one
    owners = modules()
    names = declared(with_extra) | {OURS, "pip", "setuptools"}
    found = {module for module, those in owners.items() if names & those}
    spelled = {one.name for one in metadata.distributions() if canonicalize_name(one.name) in names}
    head = _ALONE.format(hidden=sorted(set(owners) - found), names=sorted(spelled))
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    env |= {
        "WANDB_MODE": "offline",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "DS_ACCELERATOR": "cpu",
        "RESILIENCE_RUN_DIR": str(where / "run"),
    }
    command = [sys.executable, "-c", head + program]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=200)


def test_every_extra_is_tried():
    """But those that are for who works on the SDK."""
    assert set(USES) == set(metadata.metadata(OURS).get_all("Provides-Extra")) - set(_NOT_OF_USERS)


@pytest.mark.parametrize("extra", USES)
def test_an_extra_alone_is_enough(extra, tmp_path):
    """What it is for works with its packages and no others."""
    done = run(USES[extra], extra, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# Of the first the script imports the framework itself; `top` is plainer without, and torch brings what `report` needs.
_NOT_MISSED = {"data", "accelerate", "deepspeed", "megatron", "top", "report"}


@pytest.mark.parametrize("extra", sorted(set(USES) - _NOT_MISSED))
def test_without_it_the_cure_is_told(extra, tmp_path):
    """One line says what to install, and a command ends without a traceback."""
    done = run(USES[extra], None, tmp_path)
    assert done.returncode != 0, done.stdout
    assert "pip install" in done.stderr, done.stderr
    if "cli.main" in USES[extra]:
        assert "Traceback" not in done.stderr
