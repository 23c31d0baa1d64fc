"""An index of one run's journal, whatever it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needed
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from told_run import EVENTS

from resilience_sdk.cli.main import main
from resilience_sdk.history.indexer import Index
from resilience_sdk.history.questions import History

needed.library("sqlalchemy", "history")
_TEXTS = st.sampled_from(["0001-crash", "a\0b", "\ud800", "x" * 5000, ""]) | st.text(max_size=4)
_ODD = st.fixed_dictionaries(
    {"event": st.sampled_from(["incident", "recovered", "attempt_start", "run_start", "rank_start", "health"])},
    optional={
        "kind": st.just("crash"), "id": _TEXTS, "host": _TEXTS, "job": _TEXTS, "check": _TEXTS, "ok": st.just(False),
        "nodes": st.lists(_TEXTS, max_size=2), "cause": _TEXTS, "signature": _TEXTS, "node_name": _TEXTS,
        "recovery_s": st.just(10**400) | st.floats(), "confidence": st.just(-(10**400)) | st.floats(),
        "attempt": st.integers(), "world_size": st.integers(), "settings": st.dictionaries(_TEXTS, _TEXTS, max_size=2),
        "argv": st.lists(_TEXTS, max_size=3),
    },
)  # fmt: skip


def lines_of(events: list[dict[str, Any]]) -> bytes:
    """Return a journal of these events."""
    return b"".join(json.dumps({"t": 1000.0, **event}).encode() + b"\n" for event in events)


@given(st.lists(EVENTS | _ODD, max_size=12))
@example([{"event": "run_start", "argv": ["\ud800"]}])
@settings(max_examples=25)
def test_whatever_a_journal_holds_it_is_indexed_and_asked(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]
) -> None:
    """One journal that is odd must not keep all others out of an index that many share."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "run" / "journal").mkdir(parents=True)
    (folder / "run" / "journal" / "host-launcher-1.jsonl").write_bytes(lines_of(events))
    index = Index(str(folder / "history.db"))
    done = index.add([folder])
    index.close()
    assert (done.runs, done.events + done.torn) == (1, len(events))
    history = History(str(folder / "history.db"))
    history.nodes()
    history.rates()
    history.causes()
    history.recurring()
    history.omens(history.nodes(), 1000.0)
    history.close()


def test_a_journal_of_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    """We have not written it."""
    journal = tmp_path / "run" / "journal"
    journal.mkdir(parents=True)
    (journal / "a.jsonl").write_bytes(lines_of([{"event": "health"}]))
    with open(bytes(journal) + b"/\xff.jsonl", "wb") as file:
        file.write(lines_of([{"event": "health"}]))
    index = Index(str(tmp_path / "history.db"))
    assert index.add([tmp_path / "run"]).events == 1
    index.close()


def test_a_folder_that_is_spelt_wrongly_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is a database in it."""
    assert main(["history", "index", str(tmp_path / "rums")]) == 2
    assert "rums is no run directory and has none in it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_killed_launcher_worked_until_its_last_sign_of_life_and_its_death_is_a_failure(tmp_path: Path) -> None:
    """The next job tells both, though it comes much later; a job that runs on has failed of nothing."""
    journal = tmp_path / "run" / "journal"
    journal.mkdir(parents=True)
    attempt = {"event": "attempt_start", "attempt": 0, "host": "a", "world_size": 2, "node_name": "a", "ranks": [0, 1]}
    first = [{"event": "run_start", "t": 1000.0, "job": "one", "host": "a"}, {**attempt, "t": 1001.0, "job": "one"}]
    again = [
        {"event": "run_start", "t": 1218.0, "job": "two", "host": "a", "unheld_s": 187.0},
        {**attempt, "t": 1219.0, "job": "two"},
    ]
    (journal / "a-launcher-1.jsonl").write_bytes(lines_of(first))

    def asked() -> tuple[list[str], float, float]:
        index = Index(str(tmp_path / "history.db"))
        index.add([tmp_path])
        index.close()
        history = History(str(tmp_path / "history.db"))
        found = [failure.cause for failure in history.failures()]
        worked = (history.rates()[-1].worked_s, history.nodes()[0].worked_s)
        history.close()
        return found, *worked

    assert asked() == ([], 0.0, 0.0)
    (journal / "a-launcher-2.jsonl").write_bytes(lines_of(again))
    assert asked() == (["launcher_killed"], 30.0, 30.0)
