"""A line is told from what launchers, loggers and kernels put before it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.log_lines import parse_line


@pytest.mark.parametrize(
    ("raw", "text", "rank", "level"),
    [
        (b"[rank3]: hello", "hello", 3, None),
        (b"[rank12]:[E1120 22:30:10.617816859 ProcessGroupGloo.cpp:67] hello", "hello", 12, "ERROR"),
        (b"[default5]:hello", "hello", 5, None),
        (b"7: hello", "hello", 7, None),
        (b"[1,4]<stderr>:hello", "hello", 4, None),
        (b"(TrainWorker[rank=9] pid=77, ip=10.0.0.1) [rank9]: hello", "hello", 9, None),
        (b"(Worker_TP1 pid=77) ERROR hello", "hello", None, "ERROR"),
        (b"2026-01-31 10:00:00,123 WARNING [rank2] hello", "hello", 2, "WARNING"),
        (b"[2021-08-12 08:19:28,225] [INFO] hello", "hello", None, "INFO"),
        (b"2026-01-31T10:00:00Z INFO - hello", "hello", None, "INFO"),
        (b"W1120 22:16:41.501000 19819 torch/distributed/run.py:874] hello", "hello", None, "WARNING"),
        (b"[Sat Mar  4 04:10:52 2023] hello", "hello", None, None),
        (b"[171167.620236] hello", "hello", None, None),
        (b"kern  :err   : 2025-01-21T04:41:44,283302+00:00 hello", "hello", None, "ERROR"),
        (b"Rank 6: hello", "hello", 6, None),
        (b"\x1b[31m[rank1]: hello\x1b[0m", "hello", 1, None),
        (b"plain words: hello", "plain words: hello", None, None),
        (b"", "", None, None),
        (b"caf\xff", "caf�", None, None),
    ],
)
def test_the_words_are_told_from_their_prefix(raw, text, rank, level):
    """Rank and level are read in the forms that launchers and loggers use; colours and bad bytes do no harm."""
    line = parse_line(1, raw)
    assert (line.text, line.rank, line.level) == (text, rank, level)


@pytest.mark.parametrize("prefix", [b"[rank0]: ", b"[default0]:", b"", b"0: "])
def test_indentation_is_kept_behind_a_prefix(prefix):
    """Tracebacks are told by it."""
    assert parse_line(1, prefix + b'  File "t.py", line 3, in f').text.startswith(" ")


def test_a_syslog_line_names_its_node():
    """The kernel's words come with the host."""
    line = parse_line(1, b"Mar  4 04:10:52 gpu-7 kernel: NVRM: Xid")
    assert (line.node, line.text) == ("gpu-7", "NVRM: Xid")


def test_a_very_long_line_keeps_both_of_its_ends():
    """What matters stands at the start or at the end; the rest is not kept."""
    line = parse_line(1, b"begin " + b"x" * 1_000_000 + b" end")
    assert line.text.startswith("begin")
    assert line.text.endswith("end")
    assert len(line.text) < 10_000


@given(st.binary(max_size=300))
def test_any_bytes_are_a_line(raw):
    """Nothing that a job writes stops the reader."""
    line = parse_line(5, raw)
    assert line.number == 5
    assert line.rank is None or line.rank >= 0
