"""The same bug twice has one fingerprint; two bugs have two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.exceptions import fingerprint, is_raised_by_program, normalise_message


@pytest.mark.parametrize(
    ("once", "again"),
    [
        ("<Model object at 0x7f12ab>", "<Model object at 0x55aa>"),
        ("Connection closed by peer [127.0.0.1]:40551", "Connection closed by peer [127.0.0.1]:1999"),
        ("cannot reach [::1]:29500", "cannot reach [fe80::1%eth0]:29400"),
        ("cannot reach 10.0.0.1:29500", "cannot reach 10.0.0.2:80"),
        ("bind failed, port: 29500", "bind failed, port: 31999"),
        ("worker (pid(s) 71, 72) exited", "worker (pid(s) 4711) exited"),
        ("at 2026-03-01 10:00:00,123 failed", "at 2026-03-02T11:30:00Z failed"),
        ("[10:00:00.5] failed", "[11:30:00] failed"),
        ("no file /tmp/tmpab12cd_x/model.pt", "no file /tmp/tmpzz99zz/model.pt"),
        ("run 6f1c0a52-0000-4a4a-8b8b-1234567890ab", "run 00000000-0000-4a4a-8b8b-1234567890ab"),
    ],
)
def test_what_differs_between_two_runs_is_replaced(once, again):
    """Addresses, ports, pids, times and temporary names do not make a new error."""
    assert normalise_message(once) == normalise_message(again)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("size mismatch: 4 vs 8", "size mismatch: 4 vs 16"),
        ("index 7 is out of bounds", "index 8 is out of bounds"),
        ("loss is nan at step 40", "loss is nan at step 57"),
        ("needs version 1.2.3", "needs version 1.2.4"),
        ("x[1:2]", "x[1:3]"),
        ("no file /tmp/tmpab12cd/a", "no file /tmp/tmpab12cd/b"),
        ("import failed: portage 3", "import failed: portage 4"),
    ],
)
def test_what_tells_two_bugs_apart_stays(one, other):
    """Shapes, indices, steps, versions and names are the message."""
    assert normalise_message(one) != normalise_message(other)


@given(st.text())
def test_normalising_twice_changes_nothing_more(message):
    """A stored fingerprint can be compared with a fresh one."""
    assert normalise_message(normalise_message(message)) == normalise_message(message)


def test_the_innermost_frame_of_the_user_counts():
    """Without `user_frame`, frames of installed packages and of the standard library are skipped."""
    frames = [
        "/venv/lib/python3.11/site-packages/torch/nn/functional.py:1 linear",
        "/home/u/model.py:9 forward",
        "/home/u/train.py:3 main",
    ]
    assert fingerprint({"type": "T", "message": "", "frames": frames}).user_frame == "/home/u/model.py:9 forward"
    assert fingerprint({"type": "T", "user_frame": "a.py:1 f", "frames": frames}).user_frame == "a.py:1 f"
    assert fingerprint({}) == ("", "", None)


_DEVICE = "CUDA error: uncorrectable ECC error encountered"
_RAISED = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    main()
  File "/home/me/train.py", line 5, in parse
    {line}
{error}
"""
_CAUGHT = (
    "torch.AcceleratorError: CUDA error\n\nThe above exception was the direct cause of the following exception:\n\n"
)


@pytest.mark.parametrize(
    ("line", "before", "frame", "is_own"),
    [
        ('raise ValueError(f"cannot parse {text}")', "", "/home/me/train.py:5 parse", True),
        ("loss.item()", "", "/home/me/train.py:5 parse", False),
        (
            'raise RuntimeError("the step failed") from error',
            _CAUGHT,
            "/home/me/train.py:5 parse",
            False,
        ),
        ("raise RuntimeError(text)", "Traceback (most recent call last):\n  ...\n", "/home/me/train.py:5 parse", False),
        ("raise RuntimeError(text)", "", "/usr/lib/python3/site-packages/x.py:5 parse", False),
    ],
)
def test_what_the_program_raises_itself_is_its_own_word(line, before, frame, is_own):
    """A parser of logs quotes a device. What was caught is the device's all the same, and what a library raises."""
    error = f"RuntimeError: {_DEVICE}"
    record = {
        "type": "RuntimeError",
        "message": _DEVICE,
        "frames": [frame, "/home/me/train.py:9 <module>"],
        "user_frame": "/home/me/train.py:5 parse",
        "traceback": before + _RAISED.format(line=line, error=error),
    }
    assert is_raised_by_program(record) is is_own
