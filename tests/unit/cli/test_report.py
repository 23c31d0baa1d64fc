"""`resilience report` writes one page, whole or not at all, says where it is, and prints its facts with `--json`."""

import json
import os

import attrs
import pytest

from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.report.facts import RunFacts


@pytest.fixture
def run(tmp_path):
    """A run directory in which a job has begun."""
    directory = RunDirectory.create(tmp_path / "run")
    journal = Journal(directory.journal, writer="launcher", host="node1", boot_id="b", job="job-a")
    journal.emit(Event.RUN_START)
    journal.emit(Event.ATTEMPT_START, world_size=2)
    journal.close()
    return directory


def test_the_page_is_in_the_run_directory(run, capsys):
    """Without a place the page is report.html beside the journal, and the command says so."""
    assert main(["report", str(run.path)]) == 0
    assert run.report.read_text().startswith("<!doctype html>")
    assert str(run.report) in capsys.readouterr().out


def test_the_page_is_where_it_was_asked_for(run, tmp_path, capsys):
    """A page of its own is as readable as its folder, and nothing else is left there."""
    place = tmp_path / "out"
    place.mkdir()
    assert main(["report", str(run.path), "-o", str(place / "a b.html")]) == 0
    assert os.listdir(place) == ["a b.html"]
    assert not run.report.exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (".", "is a directory: name the file"),
        ("missing/report.html", "choose a place with --output"),
    ],
)
def test_a_place_that_cannot_be_is_an_error_with_its_cure(run, tmp_path, capsys, place, why):
    """The page goes nowhere but where it was asked for."""
    assert main(["report", str(run.path), "-o", str(tmp_path / place)]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_json_prints_the_facts(run, capsys):
    """The keys are the fields of the facts; no page is written."""
    assert main(["report", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {field.name for field in attrs.fields(RunFacts)}
    assert told["run_dir"] == str(run.path)
    assert not run.report.exists()


def test_json_and_a_place_contradict_each_other(run, capsys):
    """With --json there is no page, so a place for it is a mistake."""
    assert main(["report", str(run.path), "--json", "-o", "x.html"]) == 2
    assert "leave one of" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_named(tmp_path, capsys):
    """As all reading commands do it."""
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
