"""An adapter, a probe, a sink and a cause more: one file each, as the documentation has them, in a copy of the clone.

Nothing else of the package is touched, and what is added is used from an installation of that copy.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import documented
import installs
import pytest
from installs import PROJECT, Installation

pytestmark = pytest.mark.slow
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "resilience-runs")
SCENARIOS = "learner and (finishes or one_heartbeat or sections_are_named or second_use or detached)"
LOG = "step 12 loss 2.31\nsimulator: license server: no seat left for 'solver'\n"


def block(page: str, kind: str, beginning: str) -> str:
    """Return the block of a page that begins so."""
    (found,) = [
        one.text for one in documented.blocks(PROJECT / page, kind) if one.text.startswith(beginning) and not one.title
    ]
    return found


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Installation:
    """The copy with the four, installed as a contributor has it."""
    folder = tmp_path_factory.mktemp("extended")
    clone = folder / "clone"
    shutil.copytree(PROJECT, clone, symlinks=True, ignore=_LEFT_OUT)
    package = clone / "resilience_sdk"
    sink = block("docs/extend/sink.md", "python", "from collections import deque")
    (package / "telemetry/sinks/incident_log.py").write_text(sink)
    (package / "health/more/pages.py").write_text(block("docs/extend/probe.md", "python", '"""Whether the kernel'))
    with (package / "attribution/causes/scheduler.toml").open("a") as causes:
        causes.write("\n" + block("docs/extend/cause.md", "toml", "[license_seats]"))
    adapter = block("docs/adapters/write-your-own.md", "python", '"""Learners')
    (clone / "adapters/learner.py").write_text(adapter)
    scripts = clone / "tests/integration/scripts"
    script = (scripts / "adapter_pytorch.py").read_text()
    learner = "learner.attach(SimpleNamespace(model=model, optimizer=optimizer, loader=loader)"
    for before, now in (
        ("import os\n", "import os\nfrom types import SimpleNamespace\n"),
        ("import pytorch\n", "import learner\n"),
        ("pytorch.attach(model, optimizer, loader", learner),
        ("pytorch.attach(model, optimizer", learner),
    ):
        assert before in script
        script = script.replace(before, now)
    (scripts / "adapter_learner.py").write_text(script)
    return installs.install("editable", folder, clone, Path(), Path())


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory that has nothing to do with the clone."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    return place


def test_the_sink_is_told_of_an_incident(extended, elsewhere):
    """Named by the setting `sinks`, beside one that is no sink, which is said and does no harm."""
    log, pages = elsewhere / "incidents.log", elsewhere / "pages"
    pages.mkdir(mode=0o700)
    code, _, screen = extended.run(
        *(extended.resilience, "run", "--nproc-per-node", "2", "--run-dir", elsewhere / "run"),
        *("--sinks", f"incident-log={log},json:dumps=x", "--term-grace", "1"),
        PROJECT / "examples/unchanged_ddp.py",
        where=elsewhere,
        RESILIENCE_FAULT="kill:rank=1,step=20",
        RESILIENCE_PAGE_DIR=str(pages),
    )
    assert code == 0, screen
    assert log.read_text() == "run: crash rank_killed_sigkill\n"
    assert "the sink json:dumps is left out: ConfigError: sinks: 'json:dumps' is <function" in screen


def test_a_sink_that_nobody_has_is_refused_before_the_job_begins(extended, elsewhere):
    """With those that there are, the one of a file too."""
    words = (extended.resilience, "run", "--sinks", "incident-logg=x", "--run-dir", elsewhere / "run")
    code, _, screen = extended.run(*words, PROJECT / "examples/unchanged_ddp.py", where=elsewhere)
    assert (code, (elsewhere / "run").exists()) == (2, False)
    assert "there is no sink 'incident-logg'; there are console, history, incident-log," in screen


def test_the_doctor_runs_the_probe(extended, elsewhere):
    """Its finding stands beside those of the others."""
    code, out, err = extended.run(extended.resilience, "doctor", "--json", "--run-dir", elsewhere, where=elsewhere)
    assert code == 0, err
    (finding,) = [each for each in json.loads(out)["findings"] if each["probe"] == "pages"]
    assert finding["check"] == "large pages"
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    assert finding["status"] == ("ok" if told.exists() and "[never]" not in told.read_text() else finding["status"])


def test_a_log_shows_the_cause(extended, elsewhere):
    """With what is to be done about it."""
    (elsewhere / "job.log").write_text(LOG)
    code, out, err = extended.run(extended.resilience, "diagnose", "--json", "job.log", where=elsewhere)
    assert code == 0, err
    verdict = json.loads(out)
    assert (verdict["category"], verdict["cause"], verdict["action"]) == ("scheduler", "license_seats", "wait")


@pytest.mark.timeout(400)
def test_the_contract_suite_takes_the_adapter(extended, elsewhere):
    """It is found by its script, and keeps what a training that nothing happens to is asked for."""
    code, out, err = extended.run(
        *(extended.python, "-m", "pytest", "-q", "-n", "0", "-m", "slow", "-p", "no:cacheprovider"),
        *(f"--basetemp={elsewhere / 'base'}", "tests/integration/adapters_contract", "-k", SCENARIOS),
        where=extended.place,
        timeout_s=350,
        PATH=os.environ["PATH"],
    )
    assert code == 0, out + err
    assert "5 passed" in out
