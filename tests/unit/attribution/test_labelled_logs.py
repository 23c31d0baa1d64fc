"""The labelled logs beside the checkout: how often the verdict is right, also when they are told in other words."""

import pytest

from tests.bench.attribution import LOGS, labelled_logs, score
from tests.bench.perturb import CHANGES

_LOGS = labelled_logs()
pytestmark = pytest.mark.skipif(not _LOGS, reason=f"the labelled logs are not at {LOGS}")


def test_the_verdicts_on_the_labelled_logs():
    """Category and action nearly always, the cause mostly, and never a cascade or a fault where there is none."""
    found = score(_LOGS)
    assert found.share("both") >= 0.95, found.wrong
    assert found.share("cause") >= 0.90, found.wrong
    assert found.cascades == 0, found.wrong
    clean = score([log for log in _LOGS if log.cause == "no_fault"])
    assert clean.share("cause") == 1.0, clean.wrong


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_logs_in_other_words(change):
    """Rules that learned the files by heart would not stand this."""
    found = score(_LOGS, CHANGES[change])
    assert found.share("both") >= 0.93, found.wrong
    assert found.share("cause") >= 0.90, found.wrong
