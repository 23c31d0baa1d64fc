"""What the monitor publishes, who may change what, and what listeners hear."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs
import pytest

from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler import published
from resilience_sdk.straggler.callbacks import Listening
from resilience_sdk.straggler.published import (
    ControlFile,
    StandingVerdicts,
    write_report,
    write_standing,
)
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import Change, SlowVerdict

VERDICT = SlowVerdict("transient", "bwd", "compute", "", (2,), ("n0",), False, 17, 32, ratio=2.0)


def standing(*numbers: int, attempt: int = 0, at: float = 1.0) -> StandingVerdicts:
    changes = tuple(Change("found", attrs.evolve(VERDICT, last_step=n), n) for n in numbers)
    return StandingVerdicts(attempt, at, verdicts=(VERDICT,), changes=changes)


def settings_file(run_dir: Path) -> Path:
    (run_dir / "stragglers").mkdir(exist_ok=True)
    return run_dir / "stragglers" / "settings.json"


def replace(path: Path, text: str) -> None:
    """Write a file as an editor does: another inode each time."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").chmod(0o600)
    path.with_suffix(".new").replace(path)


def test_what_is_published_is_read_back(tmp_path):
    """Verdicts with their changes, and reports; as private as the run directory."""
    os.chmod(tmp_path, 0o700)
    write_standing(tmp_path, standing(1, 2))
    write_report(tmp_path, Report({0: "n0"}, verdicts=(VERDICT,)))
    assert published.read_standing(tmp_path) == standing(1, 2)
    assert published.read_report(tmp_path).verdicts == (VERDICT,)
    assert (tmp_path / "stragglers").stat().st_mode & 0o777 == 0o700


def test_only_files_that_nobody_else_can_write_count(tmp_path):
    """A link, and a file that the group may write, change nothing."""
    path = settings_file(tmp_path)
    path.write_text('{"stop_if_detected": true}')
    path.chmod(0o620)
    file = ControlFile(tmp_path, Settings())
    assert "others can write it" in file.look()
    assert file.now == Settings()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert file.look() is None
    assert file.now == Settings()


def test_settings_change_while_the_job_runs_and_go_back(tmp_path):
    """Each change is said once; without the file what the job was started with holds."""
    path, file = settings_file(tmp_path), ControlFile(tmp_path, Settings(relative_threshold=0.8))
    assert file.look() is None
    replace(path, '{"relative_threshold": 0.9, "report_interval": "1min"}')
    assert file.look() == "straggler settings changed: report_interval = 60, relative_threshold = 0.9"
    assert file.look() is None
    replace(path, '{"straggler_detection": false}')
    assert "straggler_detection = false" in file.look()
    assert (file.now.straggler_detection, file.now.relative_threshold) == (False, 0.8)
    path.unlink()
    assert file.look() == "straggler settings changed: straggler_detection = true"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object"),
        ('{"relative_treshold": 0.8}', "did you mean relative_threshold?"),
        ('{"relative_threshold": 7}', "relative_threshold"),
        ('{"on_hang": "kill"}', "cannot be changed"),
        ('{"report_interval": 0, "scores_to_print": 3}', "report_interval"),
    ],
)
def test_a_bad_file_is_one_line_and_changes_nothing(tmp_path, text, message):
    """It names what is wrong; what held before goes on."""
    with pytest.raises(ConfigError, match=r"f\.json"):
        published.values_of(text, "f.json")
    path, file = settings_file(tmp_path), ControlFile(tmp_path, Settings())
    replace(path, '{"scores_to_print": 1}')
    file.look()
    replace(path, text)
    said = file.look()
    assert said.startswith("straggler settings stay as they are: ")
    assert message.replace("'", "") in said.replace("'", "")
    assert file.now.scores_to_print == 1
    assert file.look() is None


def test_listeners_hear_each_change_once(tmp_path):
    """Also those between two looks; nothing of an earlier attempt or job, and all of a monitor that begins anew."""
    write_standing(tmp_path, standing(1))
    listening, heard = Listening(), []
    listening.add_listener(lambda change: heard.append(change.verdict.last_step))
    listening.begin(tmp_path, 1)
    listening.look()
    write_standing(tmp_path, standing(7, attempt=0, at=2.0))
    listening.look()
    assert heard == []
    write_standing(tmp_path, standing(attempt=1))
    write_standing(tmp_path, standing(1, 2, attempt=1))
    listening.look()
    listening.look()
    write_standing(tmp_path, standing(1, 2, 3, attempt=1))
    listening.look()
    assert heard == [1, 2, 3]
    write_standing(tmp_path, standing(attempt=1, at=3.0))
    listening.look()
    write_standing(tmp_path, standing(1, attempt=1))
    listening.look()
    assert heard == [1, 2, 3, 1]


def test_a_listener_that_raises_is_left_out_and_the_others_go_on(tmp_path, capfd):
    """One line says so; the thread that calls lives on."""
    listening, heard = Listening(), []

    def fails(change):
        raise RuntimeError("no network")

    listening.begin(tmp_path, 0)
    listening.add_listener(fails)
    listening.add_listener(heard.append)
    for numbers in ((1,), (1, 2)):
        write_standing(tmp_path, standing(*numbers))
        listening.look()
    assert len(heard) == 2
    assert capfd.readouterr().err.count("no network") == 1


def test_the_report_is_that_of_this_attempt_and_read_once(tmp_path):
    """None before there is one; afterwards the same object until there is another."""
    write_report(tmp_path, Report({0: "old"}))
    listening = Listening()
    assert listening.report() is None
    listening.begin(tmp_path, 0)
    assert listening.report() is None
    write_report(tmp_path, Report({0: "new"}))
    assert listening.report().nodes == {0: "new"}
    assert listening.report() is listening.report()
    write_report(tmp_path, Report({0: "newer"}))
    assert listening.report().nodes == {0: "newer"}
    (tmp_path / "stragglers" / "report.json").write_text(json.dumps({"nodes": 3}))
    assert listening.report() is None
