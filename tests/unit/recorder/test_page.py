"""The page between a rank and its monitor: what is written is read back, and garbage never hurts the reader."""

from __future__ import annotations

import os
import random
import shutil
import struct
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recording import Recording

from resilience_sdk import heartbeat
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_reader import LaneView, OpenSection, PageReader, RankSnapshot, snapshot_to_json
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.straggler import section

ANY_WORD = st.one_of(
    st.integers(0, 200), st.integers(0, (1 << 64) - 1), st.sampled_from([1 << 32, (1 << 63) - 1, (1 << 64) - 1])
)


def create(path: Path, **changes: object) -> RankPage:
    values = {
        "pid": 4242,
        "start_ticks": 99,
        "rank": 3,
        "local_rank": 1,
        "world_size": 8,
        "attempt": 2,
        "created_ns": 12345,
        "facts": {"host": "node7", "script": "train.py"},
    }
    return RankPage.create(path, **(values | changes))


@example({"host": "node7", "script": "é" * 200})
@example({"host": "node7", "script": "package." * 80})
@example({"host": "\0" * 64, "script": "\0" * 600})
@given(st.dictionaries(st.sampled_from(["host", "script"]), st.text(max_size=700), min_size=2))
@settings(max_examples=30, deadline=None)
def test_host_and_script_are_told_however_long_their_names_are(tmp_path_factory, facts):
    """A long one is cut by itself: its beginning is still read, and so is the other one."""
    page = create(tmp_path_factory.mktemp("facts") / "r3.page", facts=facts)
    reader = PageReader(page.path)
    told = reader.snapshot()
    reader.close()
    for name, fact in facts.items():
        said = fact.encode(errors="replace").decode()
        read = getattr(told, name)
        assert read == said or (len(said) > 30 and read[:8] == said[:8]), (read, said)


@pytest.fixture(scope="module")
def used_page(tmp_path_factory) -> bytes:
    """The bytes of a page in the middle of a step, with all tables in use."""
    with Recording(tmp_path_factory.mktemp("page")) as recording:
        for step in range(5):
            with heartbeat(step=step), section("fwd"), section("load", kind="io", timeout=3.0):
                pass
        heartbeat.beat(7)
        with heartbeat(), section("fwd"):
            return bytes(recording.page.bytes)


def test_identity_is_read_back(tmp_path):
    """What the rank said at the start, and what it corrected."""
    page = create(tmp_path / "a.page")
    reader = PageReader(page.path)
    snapshot = reader.snapshot()
    assert snapshot is not None
    assert (snapshot.rank, snapshot.local_rank, snapshot.world_size, snapshot.attempt) == (3, 1, 8, 2)
    assert (snapshot.pid, snapshot.start_ticks, snapshot.host, snapshot.script) == (4242, 99, "node7", "train.py")
    assert (snapshot.step, snapshot.beats, snapshot.lanes, snapshot.exit_state) == (None, 0, (), "running")
    page.set_identity(5, 0, 16)
    assert (corrected := reader.snapshot()) is not None
    assert (corrected.rank, corrected.world_size) == (5, 16)


def test_a_page_is_made_exclusively_and_privately(tmp_path):
    """No page is overwritten, no link is followed, nobody else may read it."""
    page = create(tmp_path / "a.page")
    assert page.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create(page.path)
    (tmp_path / "link.page").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"link\.page"):
        create(tmp_path / "link.page")
    assert not (tmp_path / "target").exists()


def test_what_is_not_a_private_page_is_not_opened(tmp_path):
    """A page that others can read, a link, a short file and a directory are refused with OSError."""
    path = create(tmp_path / "a.page").path
    (tmp_path / "link.page").symlink_to(path)
    (tmp_path / "short.page").write_bytes(b"x" * 100)
    (tmp_path / "short.page").chmod(0o600)
    (tmp_path / "folder.page").mkdir(mode=0o700)
    path.chmod(0o644)
    for name in ("a", "link", "short", "folder", "missing"):
        with pytest.raises(OSError, match=name):
            PageReader(tmp_path / f"{name}.page")


def test_an_unfinished_page_is_none_yet(tmp_path):
    """Until the writer has set the magic word, there is no snapshot; and none while a change is under way."""
    page = create(tmp_path / "a.page")
    reader = PageReader(page.path)
    page.words[at.W_MAGIC] = 0
    assert reader.snapshot() is None
    page.words[at.W_MAGIC] = at.MAGIC
    page.words[at.W_SEQUENCE] += 1
    assert reader.snapshot() is None
    page.words[at.W_SEQUENCE] += 1
    assert reader.snapshot() is not None
    assert reader.garbled == 2


def test_each_duration_is_read_once(recording):
    """Durations come in order, once, with the number of the first; the oldest of too many are dropped."""
    for _ in range(3):
        with section("a"):
            pass
    (new,) = recording.reader.passes()
    assert (new.name, new.kind, new.start, len(new.samples_ns)) == ("a", "compute", 0, 3)
    assert recording.reader.passes() == []
    for _ in range(2 * at.RING_SAMPLES):
        with section("a"):
            pass
    (new,) = recording.reader.passes()
    assert (new.start > 0, len(new.samples_ns)) == (True, at.RING_SAMPLES - 1)


def read_all(data: bytes) -> RankSnapshot | None:
    """Read a page of these bytes in every way; whatever they are, nothing may be raised."""
    path = Path(f"/dev/shm/page-test-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data.ljust(at.PAGE_BYTES, b"\0"))
        reader = PageReader(path)
        snapshot = reader.snapshot()
        for new in reader.passes():
            assert isinstance(new.name, str)
            assert new.kind in at.KINDS
            assert all(0 <= sample < 1 << 64 for sample in new.samples_ns)
            assert len(new.samples_ns) < at.RING_SAMPLES
        reader.passes()
        again = reader.snapshot()
        assert (again is None) == (snapshot is None)
        reader.close()
    finally:
        os.close(fd)
        path.unlink()
    if snapshot is not None:
        assert 0 <= snapshot.rank < snapshot.world_size
        assert len(snapshot.main_lane.stack) <= at.RING_SLOTS
        assert snapshot.step is None or snapshot.step >= 0
        snapshot_to_json(snapshot)
    return snapshot


@given(st.binary(max_size=4096))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_no_page(data):
    """Anything without the magic word is None."""
    assert read_all(data) is None


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_page_is_none_or_plausible(used_page, data):
    """A page with any words overwritten by anything gives None or a snapshot in range, never an exception."""
    words = data.draw(
        st.dictionaries(st.one_of(st.integers(0, 160), st.integers(0, at.PAGE_WORDS - 1)), ANY_WORD, max_size=40)
    )
    page = bytearray(used_page)
    for index, word in words.items():
        if index != at.W_MAGIC:
            struct.pack_into("=Q", page, index * 8, word)
    read_all(bytes(page))


@given(st.binary(min_size=1, max_size=at.TEXT_BYTES + at.PAUSE_TEXT_BYTES), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_any_text_can_be_read(used_page, text, name):
    """Host, script, pause and names may hold any bytes."""
    page = bytearray(used_page)
    page[at.TEXT_AT : at.TEXT_AT + len(text)] = text
    struct.pack_into("=Q", page, at.W_PAUSED * 8, 1)
    place = (at.name_at(name) + at.N_TEXT) * 8
    page[place : place + at.NAME_BYTES] = text[: at.NAME_BYTES].ljust(at.NAME_BYTES, b"\xff")
    snapshot = read_all(bytes(page))
    assert snapshot is not None
    assert snapshot.paused is not None


def test_deeply_nested_text_is_no_trap(used_page):
    """JSON that nests as deep as the text has room does not overflow the reader."""
    page = bytearray(used_page)
    page[at.TEXT_AT : at.TEXT_AT + at.TEXT_BYTES] = b"[" * at.TEXT_BYTES
    assert read_all(bytes(page)) is not None


def test_a_reader_beside_a_busy_writer_sees_no_impossible_state(recording):
    """While another thread works as fast as it can, each reading is one of a possible moment."""
    stop, order = threading.Event(), random.Random(5)
    names = ["a", "b", "c"]
    page = recording.page

    def work() -> None:
        while not stop.is_set():
            with heartbeat():
                entered = order.sample(names, 3)
                for name in entered:
                    section(name).__enter__()
                for name in reversed(entered):
                    section(name).__exit__(None, None, None)
            page.set_identity(order.randrange(4), 0, 4 + order.randrange(9))

    worker = threading.Thread(target=work)
    worker.start()
    beats, seen = 0, 0
    try:
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < 0.7 or (min(seen, beats) <= 10 and passed_s < 30):
            snapshot = recording.reader.snapshot()
            now = time.monotonic_ns()
            if snapshot is None:
                continue
            seen += 1
            assert snapshot.rank < snapshot.world_size
            lane = snapshot.main_lane
            assert lane.beats >= beats
            beats = lane.beats
            assert len(lane.stack) <= 4
            assert all(opened.entered_ns <= now for opened in lane.stack)
            for new in recording.reader.passes():
                assert all(sample < 60e9 for sample in new.samples_ns)
    finally:
        stop.set()
        worker.join()
    assert seen > 10
    assert beats > 10


def test_a_change_that_was_cut_off_is_healed_by_the_next(tmp_path):
    """An exception between two bytecodes may leave the page odd; the rank must not stay unreadable for that."""
    page = create(tmp_path / "a.page")
    reader = PageReader(page.path)
    page.words[at.W_SEQUENCE] += 1
    assert reader.snapshot() is None
    page.set_paused(1, "why")
    snapshot = reader.snapshot()
    assert snapshot is not None
    assert snapshot.paused == "why"


def test_two_threads_change_the_header_one_after_the_other(tmp_path):
    """The helper thread corrects the identity while the training thread registers a name: one waits for the other."""
    page = create(tmp_path / "a.page")
    helper = threading.Thread(target=page.set_identity, args=(1, 1, 4))
    with page._changing():
        helper.start()
        helper.join(0.05)
        assert helper.is_alive()
    helper.join()
    snapshot = PageReader(page.path).snapshot()
    assert snapshot is not None
    assert (snapshot.rank, snapshot.world_size) == (1, 4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a page is made again on Linux only")
def test_a_page_made_again_loses_no_store_of_a_running_thread(tmp_path):
    """A thread counts on two words without a lock while the file is removed and made again fifty times."""
    page = create(tmp_path / "a.page")
    words, stop, counts = page.words, threading.Event(), [0]
    first, second = at.RINGS_AT + at.R_COUNT, at.RINGS_AT + at.R_LEFT_NS

    def train() -> None:
        while not stop.is_set():
            counts[0] += 1
            words[first] = counts[0]
            words[second] = counts[0]

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(50):
            page.path.unlink()
            assert not page.is_there()
            page.make_again()
            assert page.is_there()
            # What the thread stores from here on is seen in the new file.
            with page.path.open("rb") as file:
                before, deadline = counts[0], time.monotonic() + 10
                while int.from_bytes(os.pread(file.fileno(), 8, first * 8), sys.byteorder) <= before:
                    assert time.monotonic() < deadline, "the thread stores elsewhere"
    finally:
        stop.set()
        thread.join()
    reader = PageReader(page.path)
    snapshot = reader.snapshot()
    assert snapshot is not None
    assert (snapshot.rank, snapshot.pid) == (3, 4242)
    assert (reader.words[first], reader.words[second]) == (counts[0], counts[0])
    assert [path.name for path in tmp_path.iterdir()] == ["a.page"]


def test_a_page_that_cannot_be_made_again_stays_as_it_is(tmp_path):
    """Its directory is gone: an error, and the rank stores on."""
    place = tmp_path / "pages"
    place.mkdir()
    page = create(place / "a.page")
    shutil.rmtree(place)
    with pytest.raises(OSError, match="No such file"):
        page.make_again()
    page.words[at.W_CHECKS] = 7
    assert page.words[at.W_CHECKS] == 7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a page is made again on Linux only")
def test_what_was_stored_while_a_page_was_copied_is_brought_along(tmp_path):
    """By the rank before the mapping changed; what was stored after that is newer and stays."""
    page = create(tmp_path / "a.page")
    copy = bytes(page.bytes)
    page.words[at.W_CHECKS], page.words[at.W_COLLECTIVES] = 5, 5
    late = bytes(page.bytes)
    page.bytes[:] = copy
    page.words[at.W_COLLECTIVES] = 6
    page._bring_along(copy, late)
    assert (page.words[at.W_CHECKS], page.words[at.W_COLLECTIVES]) == (5, 6)


@pytest.mark.parametrize("beat", ["heartbeat", "pulse"])
def test_the_step_itself_is_no_section(beat):
    """A loop whose sections nobody has named dies at its step and in no section."""
    step, forward = OpenSection("step", beat, 0, None, 0), OpenSection("fwd", "compute", 0, None, 0)
    lane = LaneView(thread_id=1, last_ns=0, beats=3, step=3, step_is_global=True, stack=(step,))
    assert (lane.section, lane.is_in_step) == (None, True)
    assert attrs.evolve(lane, stack=(step, forward)).section == "fwd"
    assert not attrs.evolve(lane, stack=(forward,)).is_in_step
