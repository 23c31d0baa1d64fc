"""Tests whose tools are missing are never passed over where all tools were asked for."""

import needed
import pytest


@pytest.mark.parametrize(
    "ask",
    [
        lambda: needed.library("no_such_library", "otel"),
        lambda: needed.program("no-such-program", "prometheus"),
        lambda: needed.fetched("NO_SUCH_VARIABLE", "file"),
    ],
    ids=["library", "program", "file"],
)
def test_what_is_missing_is_skipped_or_fails(ask, monkeypatch):
    """Either way it says what to install."""
    monkeypatch.delenv(needed.DEMAND, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"install|fetch"):
        ask()
    monkeypatch.setenv(needed.DEMAND, "1")
    with pytest.raises(pytest.fail.Exception, match=r"install|fetch"):
        ask()


def test_what_is_there_is_returned():
    """As it would be imported, or started."""
    assert needed.library("json", "otel").loads("1") == 1
    assert needed.program("sh", "dash").endswith("/sh")
    assert needed.fetched("PATH", "file")
