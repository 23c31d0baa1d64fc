"""A stack is told by the frames that its reader can change, however deep the libraries are."""

import sysconfig
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import resilience_sdk
from resilience_sdk.report.why_page import users_first

LIBRARIES = [f"{sysconfig.get_paths()['purelib']}/torch/nn/modules/module.py:{line} _call_impl" for line in range(30)]
LOOP = ["/home/me/train.py:15 train_step", "/home/me/train.py:34 main", "/home/me/train.py:39 <module>"]


def test_the_users_frames_are_shown_though_there_are_30_library_frames():
    """They come first, innermost first; where in the libraries the innermost was is one line, without its prefix."""
    assert users_first([*LIBRARIES, *LOOP]) == [
        *LOOP,
        "in torch/nn/modules/module.py:0 _call_impl (and 29 more frames of libraries)",
    ]


def test_a_stack_of_the_program_alone_is_shown_as_it_is():
    """Nothing is added. One library frame is counted in no words."""
    assert users_first(LOOP) == LOOP
    assert users_first(["/usr/lib/python3.11/threading.py:327 wait", *LOOP]) == [*LOOP, "in threading.py:327 wait"]


def test_libraries_that_call_the_program_back_are_not_told_as_where_it_was():
    """A hook or a trainer stands between two frames of the program; the innermost line is the program's."""
    assert users_first([LOOP[0], LIBRARIES[0], LOOP[2]]) == [LOOP[0], LOOP[2]]


def test_the_sdk_is_a_library_too():
    """Its frames are never taken for the user's, wherever it is installed."""
    ours = f"{Path(resilience_sdk.__file__).parent}/checkpoint/ranks.py:130 find_ranks"
    assert users_first([ours, *LOOP])[-1] == "in resilience_sdk/checkpoint/ranks.py:130 find_ranks"


def test_a_stack_without_the_program_shows_where_it_was():
    """A thread of a library has no other lines."""
    shown = users_first(LIBRARIES)
    assert shown[0] == "torch/nn/modules/module.py:0 _call_impl"
    assert shown[-1] == "and 27 more frames of libraries"
    assert users_first([]) == []


@given(st.lists(st.sampled_from([*LIBRARIES[:3], *(f"/home/me/deep.py:{line} f{line}" for line in range(40))])))
def test_a_page_has_room_for_it(stack):
    """However deep, it is ten lines at most, and begins with the innermost frame of the program."""
    shown = users_first(stack)
    assert len(shown) <= 10
    users = [frame for frame in stack if frame.startswith("/home/me")]
    if users:
        assert shown[0] == users[0]
        assert users[-1] in shown
