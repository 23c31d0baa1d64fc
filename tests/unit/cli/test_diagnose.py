"""`resilience diagnose` on files, directories, standard input and what cannot be read."""

import gzip
import io
import json
import sys

import pytest

from resilience_sdk.cli.main import main

_FULL = "[rank1]: Traceback (most recent call last):\n"
_FULL += '[rank1]:   File "/home/u/train.py", line 3, in save\n[rank1]: OSError: [Errno 28] No space left on device\n'


def test_a_log_for_a_person(tmp_path, capsys):
    """Cause, meaning, culprit, the line that says so, and the action."""
    log = tmp_path / "job.log"
    log.write_text(_FULL)
    assert main(["diagnose", str(log)]) == 0
    out = capsys.readouterr().out
    assert "storage_full (storage), confidence 0." in out
    assert "culprit     rank 1" in out
    assert "line 3: OSError: [Errno 28] No space left on device" in out
    assert "action      wait" in out


def test_one_log_is_one_object_and_several_are_a_list(tmp_path, capsys):
    """The schema of the contract, with the name of the log."""
    one, two = tmp_path / "a.log", tmp_path / "b.log.gz"
    one.write_text(_FULL)
    two.write_bytes(gzip.compress(b"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"))
    assert main(["diagnose", str(one), "--json"]) == 0
    single = json.loads(capsys.readouterr().out)
    assert set(single) == {"log", "category", "cause", "action", "confidence", "culprits", "evidence"}
    assert main(["diagnose", str(one), str(two), "--json"]) == 0
    several = json.loads(capsys.readouterr().out)
    assert [found["cause"] for found in several] == ["storage_full", "slurm_cancelled"]
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == several


def test_standard_input(monkeypatch, capsys):
    """`... 2>&1 | resilience diagnose -`."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(_FULL.encode())))
    assert main(["diagnose", "-", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["log"], found["cause"]) == ("stdin", "storage_full")


def test_what_a_job_wrote_cannot_steer_the_terminal(tmp_path, capsys):
    """Control characters of a log do not reach the screen."""
    log = tmp_path / "job.log"
    log.write_bytes(b"ValueError: \x1b]0;owned\x07 \x1b[2J bad \x08 input\n")
    assert main(["diagnose", str(log)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\x08" not in out


@pytest.mark.parametrize("empty", [True, False])
def test_mistakes_name_the_thing_and_the_cure(tmp_path, capsys, empty):
    """A path that is not there, and a directory without a file."""
    path = tmp_path if empty else tmp_path / "nothing.log"
    assert main(["diagnose", str(path)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert "name" in err


def test_an_empty_log_is_unknown(tmp_path, capsys):
    """Nothing is known of it, and that is said."""
    log = tmp_path / "empty.log"
    log.touch()
    assert main(["diagnose", str(log)]) == 0
    assert "the log is empty" in capsys.readouterr().out
