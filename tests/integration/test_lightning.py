"""Lightning in one process, as it is used at a desk: fits of all kinds, one after the other, with either package."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import DEMAND, require
from harness import job

pytestmark = pytest.mark.slow
REINSTALL = "installed before it had this entry point: pip install -e ."


@pytest.fixture(autouse=True, scope="module")
def frameworks():
    """What all of these need."""
    require("lightning.pytorch", "lightning")
    require("pytorch_lightning")
    require("torchdata")


def alone(folder, *args, terminal=None, **env):
    """Start the script by `python`, without a launcher."""
    folder.mkdir(exist_ok=True)
    return job(folder, "lightning_alone.py", *map(str, args), command=(sys.executable,), env=env, terminal=terminal)


def end_of(folder, *args, **env):
    """Run it to its end; return what it told and its screen."""
    with alone(folder, *args, **env) as run:
        assert run.finish() == 0, run.screen
        return json.loads((folder / "told" / "end").read_text()), run.screen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What 12 steps come to."""
    whole, _ = end_of(tmp_path_factory.mktemp("undisturbed"), "once", 12)
    return whole["digest"]


@pytest.mark.parametrize(
    ("package", "by"),
    [("lightning.pytorch", ()), pytest.param("pytorch_lightning", ("path",), marks=pytest.mark.release)],
)
def test_a_fit_resumes_and_is_finished(tmp_path, undisturbed, package, by):
    """The end of 12 steps is that of 7 and then 5 more; one device alone sets the flag, and the one of NVIDIA's too.

    By itself, or by `fit(ckpt_path=callback.ckpt_path)`, which is None where there is nothing to resume.
    """
    flag = tmp_path / "flag"
    env = {"LIGHTNING": package, "FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}
    first, _ = end_of(tmp_path, "once", 7, "path", **env)
    assert (first["step"], first["path"]) == (7, None)
    assert flag.exists()
    assert (tmp_path / "run" / "finished").exists()
    second, screen = end_of(tmp_path, "once", 12, *by, **env)
    assert "resumed from" in screen
    assert second["step"] == 12
    assert second["digest"] == undisturbed != first["digest"]
    assert not by or second["path"].endswith("step-00000007/lightning.ckpt")
    flag.unlink()
    again, _ = end_of(tmp_path, "once", 12, **env)
    assert again["digest"] == undisturbed
    assert flag.exists()


def test_a_manual_optimization_that_calls_parts_is_named_as_that(tmp_path):
    """Its user has attached nothing, so no line is about what to attach."""
    end, screen = end_of(tmp_path, "manual")
    assert end["step"] == 6
    assert screen.count("resilience: fwd and bwd are not timed: in manual optimization") == 1
    assert "attach" not in screen


@pytest.mark.release
def test_fifty_fits_leave_nothing_behind(tmp_path):
    """No descriptor, no thread, no signal handler; and when the process has ended no page and no monitor."""
    with alone(tmp_path, "many") as run:
        assert run.finish(100.0) == 0, run.screen
        end = json.loads((tmp_path / "told" / "end").read_text())
        assert all(end["after"][name] <= end["before"][name] for name in ("descriptors", "threads")), end
        assert end["handler"]
        assert run.incidents() == []
        assert run.left_behind() == []


def test_a_trial_an_evaluation_a_thread_a_second_fit_and_a_prompt_raise_no_incident(tmp_path):
    """Nor does a process that idles behind them, far longer than any deadline of a step."""
    deadlines = {"RESILIENCE_HEARTBEAT_TIMEOUT": "2", "RESILIENCE_OUT_OF_SECTION_TIMEOUT": "2"}
    ours, theirs = os.openpty()
    try:
        with alone(tmp_path, "kinds", terminal=theirs, **deadlines) as run:
            run.wait(lambda: (tmp_path / "told" / "idle").exists(), "the end of the fits")
            end = json.loads((tmp_path / "told" / "end").read_text())
            expect_no_incident(run, 6.0)
            os.kill(json.loads((tmp_path / "told" / "idle").read_text())["pid"], signal.SIGUSR1)
            read_until(ours, b"(Pdb) ")
            run.wait_event("suspect")
            expect_no_incident(run, 4.0)
            os.write(ours, b"c\n")
            assert run.finish() == 0, run.screen
    finally:
        os.close(ours)
        os.close(theirs)
    assert end["after_trial"] == [False, 0]
    assert end["went_on_to"] == 9
    assert end["flags"] == [True, True]  # of NVIDIA's callback, on one device, the second time too
    assert end["raised"] == "a bug of the user"
    assert (tmp_path / "told" / "answered").exists()


def expect_no_incident(run, within_s):
    """Wait for as long as an incident would take at most: those of these tests come within their deadline of 2 s."""
    with contextlib.suppress(AssertionError):
        run.wait(lambda: bool(run.incidents()), "an incident", timeout_s=within_s)
    assert run.incidents() == [], run.screen


def read_until(terminal, text):
    """Read what a program writes to its terminal, until it has written this."""
    seen = b""
    while text not in seen:
        assert select.select([terminal], [], [], 60.0)[0], seen
        seen += os.read(terminal, 4096)


def test_with_no_code_a_trainer_has_the_callback_where_the_environment_asks(tmp_path):
    """The installed entry point brings it; it saves and resumes."""
    if not entry_points(group="lightning.pytorch.callbacks_factory", name="resilience_sdk"):
        assert os.environ.get(DEMAND) != "1", REINSTALL
        pytest.skip(REINSTALL)
    first, _ = end_of(tmp_path, "automatic", 5, RESILIENCE_AUTO="1")
    assert first["callbacks"].count("ResilienceCallback") == 1
    second, screen = end_of(tmp_path, "automatic", 8, RESILIENCE_AUTO="1")
    assert (second["step"], "step 5 is next" in screen) == (8, True)
