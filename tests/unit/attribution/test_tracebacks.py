"""Tracebacks become records, however many processes write at once."""

from resilience_sdk.attribution.log_lines import parse_line
from resilience_sdk.attribution.tracebacks import Tracebacks, parse_exception_line


def _read(text):
    reader = Tracebacks()
    for number, line in enumerate(text.splitlines(), 1):
        reader.take(parse_line(number, line.encode()))
    cut = reader.close()
    return reader.finished, cut


_PLAIN = """Traceback (most recent call last):
  File "/home/u/train.py", line 40, in <module>
    main()
  File "/home/u/train.py", line 9, in main
    step(x)
    ~~~~^^^
{end}
"""


def test_a_traceback_becomes_a_record():
    """Type, message, and the frames with the innermost first, beside their source lines."""
    (raised,), cut = _read(_PLAIN.format(end="ValueError: bad batch"))
    assert (raised.type, raised.message, raised.number, raised.rank) == ("ValueError", "bad batch", 1, None)
    assert raised.frames == ("/home/u/train.py:9 main", "/home/u/train.py:40 <module>")
    assert raised.sources == ("step(x)", "main()")
    assert cut == []


def test_tracebacks_of_ranks_are_told_apart():
    """Lines of two ranks that alternate make two records."""
    texts = [_PLAIN.format(end=f"ValueError: from {rank}").splitlines() for rank in (0, 1)]
    lines = [f"[rank{rank}]: {texts[rank][n]}" for n in range(len(texts[0])) for rank in (0, 1)]
    found, _ = _read("\n".join(lines))
    assert {(raised.rank, raised.message) for raised in found} == {(0, "from 0"), (1, "from 1")}
    assert all(len(raised.frames) == 2 for raised in found)


def test_tracebacks_without_a_label_may_lie_inside_one_another():
    """Two processes on one terminal: the inner one ends first, then the outer one goes on."""
    lines = _PLAIN.format(end="KeyError: 'a'").splitlines()
    mixed = [*lines[:3], *_PLAIN.format(end="KeyError: 'b'").splitlines(), *lines[3:]]
    found, cut = _read("\n".join(mixed))
    assert sorted(raised.message for raised in found) == ["'a'", "'b'"]
    assert cut == []


def test_a_message_may_have_many_lines():
    """Indented lines belong to it, and with a rank's label the others too, up to the next line with a clock."""
    text = "[rank0]: Traceback (most recent call last):\n"
    text += '[rank0]:   File "t.py", line 1, in f\n'
    text += "[rank0]: RuntimeError: Error(s) in loading state_dict for LM:\n[rank0]: \tsize mismatch for w\n"
    text += "[rank0]: 2026-01-01 00:00:00 INFO step 3\n"
    (raised,), _ = _read(text)
    assert raised.message == "Error(s) in loading state_dict for LM:\n\tsize mismatch for w"


def test_what_a_worker_raised_is_inside_the_message():
    """The DataLoader prints the worker's own traceback as text: its frames are the innermost."""
    text = _PLAIN.format(
        end="ValueError: Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/home/u/data.py", line 7, in decode\n'
        "    raise ValueError(x)\n"
        "ValueError: bad sample\n"
    )
    (raised,), _ = _read(text)
    assert raised.frames[0] == "/home/u/data.py:7 decode"
    assert raised.message.endswith("ValueError: bad sample")


def test_chains_are_marked():
    """The second of two is known to follow the first."""
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    found, _ = _read(_PLAIN.format(end="OSError: [Errno 28] x") + chained + _PLAIN.format(end="RuntimeError: y"))
    assert [raised.chained for raised in found] == [False, True]


def test_what_was_only_logged_is_left_out():
    """A logging handler that fails, and what a destructor raises, stop nothing."""
    for words in ("--- Logging error ---", "Exception ignored in: <function A.__del__ at 0x7f>"):
        assert _read(f"{words}\n" + _PLAIN.format(end="OSError: [Errno 28] No space left on device")) == ([], [])


def test_the_launchers_own_traceback_is_no_fault():
    """torchrun raises ChildFailedError because a rank failed."""
    end = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    assert _read(_PLAIN.format(end=end)) == ([], [])


def test_a_traceback_that_is_cut_off_is_known_to_be():
    """Its rank was in trouble, whatever it was."""
    found, (cut,) = _read("\n".join(_PLAIN.splitlines()[:4]))
    assert found == []
    assert cut.type == ""
    assert cut.frames


def test_an_open_traceback_is_not_waited_for_for_ever():
    """The scan may go on at full speed when a rank that died in the middle of one says no more."""
    reader = Tracebacks()
    reader.take(parse_line(1, b"Traceback (most recent call last):"))
    assert reader.is_open(2)
    assert not reader.is_open(1000)


def test_lines_that_end_tracebacks():
    """A type and its message; not a level, not a prefix of a library."""
    assert parse_exception_line("torch.OutOfMemoryError: CUDA out of memory") == (
        "torch.OutOfMemoryError",
        "CUDA out of memory",
    )
    assert parse_exception_line("KeyboardInterrupt") == ("KeyboardInterrupt", "")
    assert parse_exception_line("ERROR: no") is None
    assert parse_exception_line("wandb: Run history") is None
    assert parse_exception_line("Epoch: 3") is None


def test_a_launchers_summary_is_not_swallowed_by_a_traceback_that_was_cut():
    """Its lines are indented, too, but less than source lines are."""
    reader = Tracebacks()
    for number, line in enumerate(_PLAIN.splitlines()[:4], 1):
        assert reader.take(parse_line(number, line.encode()))
    assert not reader.take(parse_line(9, b"  exitcode  : -6 (pid: 20284)  (SIGABRT)"))
