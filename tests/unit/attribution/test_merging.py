"""The log files of one job's ranks, judged together."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.diagnosis import diagnose_ranks
from resilience_sdk.cli.diagnose import main

LOST = """Traceback (most recent call last):
  File "/home/me/train.py", line 30, in main
    dist.all_reduce(loss)
RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:33411
"""
BAD = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in load
    raise ValueError("negative length")
ValueError: negative length
"""
STEPS = "step 1 loss 2.0\nstep 2 loss 1.9\n"


def write(folder, **texts):
    """Write `rank_N.log` files and return their paths."""
    paths = [folder / f"{name}.log" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    return paths


def test_the_rank_that_failed_is_named_not_those_that_lost_it(tmp_path):
    """Whatever the order of the files; the evidence is quoted with file and line."""
    found = diagnose_ranks(write(tmp_path, rank_0=STEPS + LOST, rank_1=STEPS + LOST, rank_2=STEPS + BAD))
    assert (found.cause, [who.rank for who in found.culprits]) == ("user_code_error", [2])
    assert (found.evidence[0].source, found.evidence[0].line) == (str(tmp_path / "rank_2.log"), 6)


def test_the_rank_without_a_word_is_the_suspect_where_all_others_lost_it(tmp_path):
    """It was killed: nothing else leaves no word."""
    found = diagnose_ranks(write(tmp_path, rank_0=STEPS + LOST, rank_1=STEPS, rank_2=STEPS + LOST, rank_3=STEPS + LOST))
    assert (found.cause, [who.rank for who in found.culprits]) == ("rank_killed_sigkill", [1])


def test_clocks_order_the_faults_of_different_files(tmp_path):
    """The older fault is the first one, though its file comes later."""
    texts = {
        "rank_0": "2026-03-01 10:00:09,000 ERROR OSError: [Errno 5] Input/output error: '/data/a'\n",
        "rank_1": "2026-03-01 10:00:05,000 ERROR OSError: [Errno 28] No space left on device: '/data/b'\n",
    }
    found = diagnose_ranks(write(tmp_path, **texts))
    assert (found.cause, [who.rank for who in found.culprits]) == ("storage_full", [1])


def test_a_job_that_finished_has_no_fault(tmp_path):
    """Only if every rank says so."""
    done = STEPS + "Training finished\n"
    assert diagnose_ranks(write(tmp_path, rank_0=done, rank_1=done)).cause == "no_fault"


@pytest.mark.parametrize("names", [("rank_0.log", "rank_1.log"), ("attempt_0/0/stderr.log", "attempt_0/1/stderr.log")])
def test_a_directory_of_rank_logs_gets_one_verdict(tmp_path, capsys, names):
    """Other files in it have theirs."""
    for name, text in zip(names, (LOST, BAD), strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"], [who["rank"] for who in found["culprits"]]) == ("user_code_error", [1])
    (tmp_path / "driver.txt").write_text(BAD)
    assert main([str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@given(
    st.lists(
        st.lists(st.sampled_from([STEPS, LOST, BAD, "", "Killed\n", "step 3\r"]), max_size=4), min_size=2, max_size=4
    )
)
def test_whatever_stands_in_the_files_there_is_a_verdict_with_quotes_of_them(tmp_path_factory, parts):
    """And a line that is quoted is there."""
    folder = tmp_path_factory.mktemp("logs")
    paths = write(folder, **{f"rank_{rank}": "".join(text) for rank, text in enumerate(parts)})
    for quoted in diagnose_ranks(paths).evidence:
        if quoted.line is not None:
            (path,) = [path for path in paths if str(path) == quoted.source]
            line = path.read_bytes().decode().split("\n")[quoted.line - 1].strip()
            assert line
            shown = line.rsplit("\r", 1)[-1]  # a terminal overwrites what stands before it
            assert shown in quoted.text or quoted.text in shown
