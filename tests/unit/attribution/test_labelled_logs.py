"""The labelled logs, those beside the checkout and our own: how often the verdict is right, also in other words."""

import csv
import re

import pytest

from tests.bench.attribution import LOGS, OWN_LOGS, labelled_logs, score
from tests.bench.perturb import CHANGES
from tests.labelled.make import FAILURES

_SETS = {"beside": labelled_logs(LOGS), "own": labelled_logs(OWN_LOGS)}


@pytest.fixture(params=_SETS)
def logs(request):
    """One set of labelled logs."""
    if not _SETS[request.param]:
        pytest.skip(f"the labelled logs are not at {LOGS}")
    return _SETS[request.param]


def test_the_verdicts_on_the_labelled_logs(logs):
    """Category and action nearly always, the cause mostly, and never a cascade or a fault where there is none."""
    found = score(logs)
    assert found.share("both") >= 0.95, found.wrong
    assert found.share("cause") >= 0.90, found.wrong
    assert found.cascades == 0, found.wrong
    clean = score([log for log in logs if log.cause == "no_fault"])
    assert clean.share("cause") == 1.0, clean.wrong


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_logs_in_other_words(logs, change):
    """Rules that learned the files by heart would not stand this."""
    found = score(logs, CHANGES[change])
    assert found.share("both") >= 0.93, found.wrong
    assert found.share("cause") >= 0.90, found.wrong


def test_our_own_logs_can_be_made_again():
    """Each has a label and a failure that makes it, and names no machine."""
    with (OWN_LOGS / "labels.tsv").open(newline="") as file:
        labelled = {row["file"].removesuffix(".txt") for row in csv.DictReader(file, delimiter="\t")}
    assert labelled == set(FAILURES) == {path.stem for path in OWN_LOGS.glob("*.txt")}
    for path in OWN_LOGS.glob("*.txt"):
        assert not re.search("/(root|tmp|home)/", path.read_text()), path.name
