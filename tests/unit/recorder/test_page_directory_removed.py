"""A page directory that was removed: made again once, whoever notices, and never where it belongs to somebody else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from resilience_sdk.core import console, job_config, json_records
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.settings import Settings
from resilience_sdk.rank.session import handed_down_config, handed_down_settings
from resilience_sdk.recorder import page_directory
from resilience_sdk.recorder.page_directory import job_page_directory, page_directories
from resilience_sdk.system import hostinfo

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="makes directories of another user, so it needs root")


def config(**changes: object) -> JobConfig:
    """Return what a launcher that is this process agrees on."""
    pid, ticks = os.getpid(), hostinfo.process_start_ticks(os.getpid()) or 0
    values = {
        "job": "j",
        "run_dir": "/nowhere",
        "run_named": True,
        "settings": Settings(checkpoint_every="5").to_json(),
        "on_hang": "restart",
        "script": "train.py",
        "launcher_pid": pid,
        "launcher_ticks": ticks,
        "creator_pid": pid,
        "creator_ticks": ticks,
        "parent_pid": pid,
        "parent_ticks": ticks,
    }
    return JobConfig(**(values | changes))


@pytest.fixture
def place(tmp_path):
    """A page directory of a job, in a place for all."""
    env = {"RESILIENCE_PAGE_DIR": str(tmp_path)}
    pages = job_page_directory("j", env)
    job_config.agree(pages, config())
    return pages


MAKER = """
import sys, pathlib
from resilience_sdk.core import job_config, json_records
from resilience_sdk.recorder import page_directory
pages = pathlib.Path(sys.argv[1])
agreed = json_records.from_text(job_config.JobConfig, sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
print(page_directory.make_again(pages, agreed), flush=True)
"""


def test_of_many_that_notice_one_makes_it_again(place):
    """Eight processes at once: the directory is there, private, and exactly one of them has made it and tells."""
    agreed = config()
    command = [sys.executable, "-c", MAKER, str(place), json_records.to_text(agreed)]
    makers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for maker in makers:
        assert maker.stdout.readline() == "ready\n"
    shutil.rmtree(place.parent)
    for maker in makers:
        maker.stdin.write("go\n")
        maker.stdin.flush()
    answers = [maker.communicate(timeout=30)[0].strip() for maker in makers]
    assert sorted(answers) == ["False"] * 7 + ["True"]
    assert job_config.read(place) == agreed
    assert [path.stat().st_mode & 0o777 for path in (place.parent, place)] == [0o700, 0o700]


def test_what_is_made_again_is_as_old_as_the_job(place):
    """What somebody asked of the job since it began still counts: it is compared with the time of this file."""
    agreed = config(began_ns=time.monotonic_ns() - 3600 * 10**9)
    shutil.rmtree(place)
    assert page_directory.make_again(place, agreed)
    assert job_config.written_at(place) == pytest.approx(time.time() - 3600, abs=60)


@pytest.mark.parametrize("what", ["symlink", "mode", "file"])
def test_a_name_that_is_not_ours_is_not_used_again(place, tmp_path, what):
    """Nothing is written into what somebody put there."""
    own, elsewhere = place.parent, tmp_path / "elsewhere"
    shutil.rmtree(own)
    elsewhere.mkdir(mode=0o700)
    if what == "symlink":
        own.symlink_to(elsewhere)
    elif what == "mode":
        own.mkdir()
        own.chmod(0o777)
    else:
        own.touch()
    with pytest.raises(PermissionError):
        page_directory.make_again(place, config())
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize("what", ["symlink", "mode", "file", pytest.param("owner", marks=needs_root)])
def test_a_taken_name_leads_all_processes_to_the_same_other_one(tmp_path, what):
    """Also those that come when the name is free again; and who only looks finds it there."""
    env = {"RESILIENCE_PAGE_DIR": str(tmp_path / "shm")}
    (tmp_path / "shm").mkdir()
    taken, elsewhere = tmp_path / "shm" / f"resilience-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "symlink":
        taken.symlink_to(elsewhere)
    elif what == "file":
        taken.touch()
    else:
        taken.mkdir()
        taken.chmod(0o777 if what == "mode" else 0o700)
        if what == "owner":
            os.chown(taken, NOBODY, NOBODY)
    first = job_page_directory("j", env)
    assert first.parent.name == f"{taken.name}.1"
    assert first.stat().st_uid == os.getuid()
    assert job_page_directory("j", env) == first
    assert list(page_directories(env)) == [first]
    assert not any(elsewhere.iterdir())
    taken.rename(tmp_path / "away")
    assert job_page_directory("j", env) == first


def test_all_names_taken_is_an_error_that_names_the_cure(tmp_path):
    """As ever: the job then runs without pages."""
    for number in range(10):
        (tmp_path / f"resilience-{os.getuid()}{f'.{number}' if number else ''}").touch()
    with pytest.raises(OSError, match="RESILIENCE_PAGE_DIR"):
        job_page_directory("j", {"RESILIENCE_PAGE_DIR": str(tmp_path)})


def test_settings_come_by_the_environment(tmp_path):
    """With no file at all."""
    env = {"RESILIENCE_INTERNAL_CONFIG": json_records.to_text(config())}
    settings = handed_down_settings(env)
    assert settings is not None
    assert settings.checkpoint_every == Settings(checkpoint_every="5").checkpoint_every
    handed_down = handed_down_config(env)
    assert handed_down is not None
    assert handed_down == attrs.evolve(config(), began_ns=handed_down.began_ns)


def test_a_file_of_settings_that_cannot_be_read_is_said(tmp_path, capsys):
    """Gone, torn or strange: one line, never defaults without a word."""
    for text in (None, "{", '{"no_such_option": 1}'):
        path = tmp_path / "settings.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        console._said.clear()
        assert handed_down_settings({"RESILIENCE_INTERNAL_SETTINGS": str(path)}) is None
        assert "settings cannot be read" in capsys.readouterr().err


def test_an_agreement_that_cannot_be_read_is_said(place, capsys):
    """And made anew by who comes."""
    (place / job_config.FILE).write_text(json.dumps({"job": "j"}))
    assert job_config.read(place) is None
    assert "cannot be read" in capsys.readouterr().err
    assert job_config.agree(place, agreed := config()) == agreed
    assert job_config.read(place) == agreed


def test_who_looks_for_an_agreement_that_is_not_there_says_nothing(tmp_path, capsys):
    """A job that begins has none."""
    assert job_config.read(Path(tmp_path)) is None
    assert not capsys.readouterr().err
