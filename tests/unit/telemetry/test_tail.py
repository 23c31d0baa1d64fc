"""No line of a journal is lost, whatever becomes of its files and of who reads them."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told_run import HOST, ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.telemetry.tail import Follower, load_position, save_position

NAME = f"{HOST}-rank0-7.jsonl"


def text(number: int, host: str = HOST) -> bytes:
    """Return one line of a journal."""
    return json.dumps({"event": "degraded", "t": float(number), "host": host, "number": number}).encode() + b"\n"


def numbers(follower: Follower, *, new: bool = False) -> list[int]:
    """Read once; return the numbers of the lines."""
    return [line.event["number"] for line in follower.read() if line.is_new or not new]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A journal file with two lines."""
    path = tmp_path / NAME
    path.write_bytes(text(0) + text(1))
    return path


def test_a_line_counts_once_its_end_is_there(file: Path) -> None:
    """What a writer has not finished is left alone, and read when it is complete."""
    follower = Follower(file.parent, HOST)
    with file.open("ab") as journal:
        journal.write(text(2)[:20])
        journal.flush()
        assert numbers(follower) == [0, 1]
        journal.write(text(2)[20:])
    assert numbers(follower) == [2]
    assert follower.torn == 0


def test_a_clock_that_is_set_back_turns_no_order_round(tmp_path: Path) -> None:
    """Else a restarted exporter would read that an attempt ended after the next one began; and a boot starts anew."""
    told = [(100.0, 50, "a", 0), (101.0, 51, "a", 1), (71.0, 52, "a", 0), (72.0, 53, "a", 1), (500.0, 3, "b", 0)]
    for number, (t, mono_ns, boot, writer) in enumerate(told):
        event = {"event": "degraded", "t": t, "mono_ns": mono_ns, "boot_id": boot, "host": HOST, "number": number}
        with (tmp_path / f"{HOST}-rank{writer}-7.jsonl").open("a") as journal:
            journal.write(json.dumps(event) + "\n")
    assert numbers(Follower(tmp_path, HOST)) == [0, 1, 2, 3, 4]


def test_a_torn_line_costs_itself_only(file: Path) -> None:
    """A writer that was killed within a line is followed by one that goes on behind it."""
    with file.open("ab") as journal:
        journal.write(text(2)[:20] + b"\n" + text(3))
    follower = Follower(file.parent, HOST)
    assert numbers(follower) == [0, 1, 3]
    assert follower.torn == 1


def test_files_that_come_later_are_found(file: Path) -> None:
    """A rank of the next attempt has a file of its own; those of other hosts are left to their own exporters."""
    follower = Follower(file.parent, HOST)
    assert numbers(follower) == [0, 1]
    (file.parent / f"{HOST}-rank1-8.jsonl").write_bytes(text(2) + text(9, host="here-too"))
    (file.parent / "there-rank2-9.jsonl").write_bytes(text(3, host="there"))
    assert numbers(follower) == [2]


def test_a_file_that_is_renamed_is_read_to_its_end(file: Path) -> None:
    """Rotation: the old file under another name, and a new one under the old name."""
    follower = Follower(file.parent, HOST)
    assert numbers(follower) == [0, 1]
    with file.open("ab") as journal:
        journal.write(text(2))
    file.rename(file.with_name(f"{NAME}.1"))
    file.write_bytes(text(3))
    assert numbers(follower) == [2, 3]
    position = follower.position
    assert numbers(Follower(file.parent, HOST, position), new=True) == []


def test_a_file_that_was_cut_is_read_anew(file: Path) -> None:
    """Rotation by copy and truncation: what is written then is new, though it stands at old places."""
    follower = Follower(file.parent, HOST)
    assert numbers(follower) == [0, 1]
    os.truncate(file, 0)
    assert numbers(follower) == []
    with file.open("ab") as journal:
        journal.write(text(2))
    assert numbers(follower) == [2]
    assert numbers(Follower(file.parent, HOST, follower.position), new=True) == []


def test_a_restarted_reader_knows_what_is_new(file: Path) -> None:
    """It reads everything, because counters begin with the first line, and tells what was not delivered."""
    first = Follower(file.parent, HOST)
    first.read()
    save_position(file.parent / "sink.json", first.position, {"id": "x"})
    with file.open("ab") as journal:
        journal.write(text(2))
    delivered, memory = load_position(file.parent / "sink.json")
    second = Follower(file.parent, HOST, delivered)
    assert [(line.event["number"], line.is_new) for line in second.read()] == [(0, False), (1, False), (2, True)]
    assert memory == {"id": "x"}


def test_a_copied_run_directory_is_new(file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Positions belong to files, not to names: in a copy every line is delivered, rather than none."""
    first = Follower(file.parent, HOST)
    first.read()
    copy = tmp_path_factory.mktemp("copy")
    shutil.copy(file, copy / NAME)
    assert numbers(Follower(copy, HOST, first.position), new=True) == [0, 1]


def test_a_line_longer_than_a_chunk(file: Path) -> None:
    """Tracebacks may be long."""
    long = json.dumps({"event": "degraded", "t": 2.0, "host": HOST, "number": 2, "why": "x" * (3 << 20)}).encode()
    with file.open("ab") as journal:
        journal.write(long + b"\n" + text(3))
    follower = Follower(file.parent, HOST)
    assert numbers(follower) + numbers(follower) + numbers(follower) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", ["", "{", "[]", '{"files": {"x": 1}}', '{"files": {"1": ["a"]}, "extra": {}}', "null"])
def test_an_unreadable_position_is_the_beginning(tmp_path: Path, bad: str) -> None:
    """Twice is better than never."""
    (tmp_path / "sink.json").write_text(bad)
    assert load_position(tmp_path / "sink.json") == ({}, {})


@given(st.integers(0, 2**32), st.lists(st.sampled_from(["write", "tear", "read", "restart", "rotate"]), max_size=40))
@settings(deadline=None, max_examples=40)
def test_every_line_arrives_whatever_happens(tmp_path_factory, seed: int, happenings: list[str]) -> None:
    """At least once over restarts at any moment, exactly once without; in the order of each file."""
    folder, chance = tmp_path_factory.mktemp("journal"), random.Random(seed)
    follower, saved, arrived, written = Follower(folder, HOST), {}, [], 0
    half = b""
    for happening in [*happenings, "write", "read"]:
        path = folder / f"{HOST}-rank{chance.randrange(2)}-1.jsonl"
        if happening == "write":
            path = folder / f"{HOST}-rank0-1.jsonl"
            with path.open("ab") as journal:
                journal.write(half + text(written))
            half, written = b"", written + 1
        elif happening == "tear":  # the first part of a line that never gets further
            with path.open("ab") as journal:
                journal.write(b'{"event": "tor\n')
        elif happening == "read":
            arrived += numbers(follower, new=True)
            saved = follower.position
        elif happening == "restart":
            if chance.random() < 0.5:
                arrived += numbers(follower, new=True)  # delivered, and killed before it was noted
            follower = Follower(folder, HOST, saved)
        elif happening == "rotate" and path.exists():
            path.rename(path.with_name(f"{path.name}.{len(list(folder.iterdir()))}"))
    assert set(arrived) == set(range(written))
    if "restart" not in happenings:
        assert arrived == sorted(arrived)
        assert len(arrived) == written


def test_times_order_the_files(tmp_path: Path) -> None:
    """Events of several writers come as they happened."""
    run = ToldRun.make(tmp_path)
    for number in range(6):
        run.tell(Event.DEGRADED, writer=f"rank{number % 3}", number=number)
    assert [line.event["number"] for line in run.lines()] == list(range(6))
