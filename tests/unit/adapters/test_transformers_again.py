"""Several ranks put back at once what the killed second save of a step has left: the first save is never lost."""

import contextlib
import os
from pathlib import Path

import pytest

from resilience_sdk.adapters.transformers import again, marks
from tests.integration import forked

ROUNDS = 60
RANKS = 3


def killed_in_second_save(output_dir, *, has_begun=True):
    """Make what such a save leaves."""
    path = output_dir / "checkpoint-5"
    marks.begin(path)
    (path / "state").write_text("first")
    marks.seal(path, 5, RANKS)
    again.set_aside(path)
    if has_begun:
        marks.begin(path)
        (path / "state").write_text("second, not whole")
        (path / "shard").write_text("of it")
    return path


def is_as_the_first_save_left_it(output_dir):
    return (
        [path.name for path in output_dir.iterdir()] == ["checkpoint-5"]
        and marks.examine(output_dir / "checkpoint-5").fault is None
        and (output_dir / "checkpoint-5" / "state").read_text() == "first"
    )


class Steps:
    """Runs something in the place where a rank is about to do its n-th thing to the directory."""

    def __init__(self, monkeypatch, at, other):
        self.left, self.other, self.is_inside = at, other, False
        rename, remove = Path.rename, again.remove_tree
        monkeypatch.setattr(Path, "rename", lambda *args: self.pass_by() or rename(*args))
        monkeypatch.setattr(again, "remove_tree", lambda *args: self.pass_by() or remove(*args))

    def pass_by(self):
        if self.is_inside:
            return
        self.left -= 1
        if self.left == 0:
            self.is_inside = True
            self.other()
            self.is_inside = False


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("at", range(1, 5))
def test_another_rank_comes_through_at_any_step(tmp_path, monkeypatch, at, has_begun):
    """It has looked at the directory before or behind any change of the first one, and makes all of its own."""
    killed_in_second_save(tmp_path, has_begun=has_begun)
    with monkeypatch.context() as patched:
        Steps(patched, at, lambda: again.put_back(tmp_path))
        again.put_back(tmp_path)
    again.put_back(tmp_path)  # a tree that the second one was the last to take away may be left: the next start has it
    assert is_as_the_first_save_left_it(tmp_path)


@pytest.mark.parametrize("at", range(1, 5))
def test_a_rank_that_is_killed_at_any_step_loses_nothing(tmp_path, monkeypatch, at):
    """The next start finds it, wherever it is."""

    def killed():
        raise KeyboardInterrupt

    path = killed_in_second_save(tmp_path)
    with monkeypatch.context() as patched:
        Steps(patched, at, killed)
        try:
            again.put_back(tmp_path)
        except KeyboardInterrupt:
            assert marks.examine(again.place_of(path)).fault is None
    again.put_back(tmp_path)
    assert is_as_the_first_save_left_it(tmp_path)


def test_ranks_that_race_lose_nothing(tmp_path):
    """In processes, many times; each round is let go by one write."""
    for number in range(ROUNDS):
        killed_in_second_save(tmp_path / str(number))

    def race(begun, told):
        for number in range(ROUNDS):
            os.write(told, b".")
            os.read(begun, 1)
            with contextlib.suppress(OSError):  # as the start of a training does
                again.put_back(tmp_path / str(number))

    told_read, told_write = os.pipe()
    begins = [os.pipe() for _ in range(RANKS)]
    pids = [forked.start(lambda begun=begun: race(begun, told_write)) for begun, _ in begins]
    os.close(told_write)
    for _ in range(ROUNDS):
        ready = 0
        while ready < RANKS:
            more = len(os.read(told_read, RANKS - ready))
            assert more, "a rank has ended"
            ready += more
        for _, begin in begins:
            os.write(begin, b".")
    assert forked.wait(pids) == [0] * RANKS
    for descriptor in (told_read, *sum(begins, ())):
        os.close(descriptor)
    lost = [number for number in range(ROUNDS) if not holds_first(tmp_path / str(number))]
    assert lost == []


def holds_first(output_dir):
    path = again.place_of(output_dir / "checkpoint-5")
    return marks.examine(path).fault is None and (path / "state").read_text() == "first"
