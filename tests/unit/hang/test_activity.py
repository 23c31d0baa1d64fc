"""What a rank does, told from outside: recorded processes, and what holds for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.core.json_records import from_values
from resilience_sdk.hang.activity import ActivityTracker, Kind
from resilience_sdk.hang.evidence import ThreadStack
from resilience_sdk.hang.samples import ActivitySample, ChildProcess, OtherThread, ThreadCounters
from resilience_sdk.hang.waits import On, Wait

RECORDED = json.loads((Path(__file__).parent / "data" / "activity.json").read_text())
SECOND = 1_000_000_000


def tracked(samples, stacks=()):
    """A tracker that has seen these samples."""
    tracker = ActivityTracker()
    for sample in samples:
        tracker.add(sample)
    for at_ns, frames in stacks:
        tracker.note_stack(at_ns, frames)
    return tracker


def seconds(*steps, start=None, on=On.LOCK, **facts):
    """Samples one second apart; each step is what the beating thread did in it: cpu_ns, switches, io_bytes."""
    counters = start or ThreadCounters(10**9, 0, 100, 10**6)
    samples = [ActivitySample(0, "S", counters, on, **facts)]
    for number, (cpu_ns, switches, io_bytes) in enumerate(steps, 1):
        counters = attrs.evolve(
            counters,
            cpu_ns=counters.cpu_ns + cpu_ns,
            switches=counters.switches + switches,
            io_bytes=counters.io_bytes + io_bytes,
        )
        samples.append(ActivitySample(number * SECOND, "S", counters, on, **facts))
    return samples


STILL = (0, 0, 0)
WORK = (900_000_000, 5, 0)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_processes_are_told(name):
    """Real processes in known states, sampled once a second for ten seconds (`tests.bench.record_activity`)."""
    case = RECORDED[name]
    samples = [from_values(ActivitySample, sample) for sample in case["samples"]]
    found = tracked(samples).activity(in_collective=case["in_collective"])
    assert found.kind.value == case["kind"], found
    assert case["on"] in ("", found.on.value)


def test_stillness_is_counted_from_the_last_movement():
    """Work ends it, wake-ups without work do not; a thread that did nothing for 5 s is stuck for 5 s."""
    found = tracked(seconds(WORK, *[STILL] * 9)).activity()
    assert (found.kind, found.still_s) == (Kind.STUCK, 9.0)
    assert tracked(seconds(*[STILL] * 5, WORK)).activity().kind is Kind.BUSY


def test_stillness_that_ended_is_remembered():
    """What was survived is told, so that the same place gets more patience."""
    tracker = ActivityTracker()
    for sample in seconds(*[STILL] * 7, WORK, STILL):
        tracker.add(sample)
        tracker.activity()
    assert tracker.survived_s == 7.0
    assert tracker.longest_s == 7.0


def test_what_a_victim_waits_for_is_not_survived():
    """Standing in a collective for twenty minutes says nothing about how long this place may be stuck."""
    tracker = ActivityTracker()
    for sample in seconds(*[STILL] * 20, WORK):
        tracker.add(sample)
        tracker.activity(in_collective=True)
    assert tracker.longest_s == 0.0


def with_child(samples, *cpu_s, io=(), state="S", **facts):
    """These samples, with a child that has used so much CPU time, and read and written so much, by each."""
    io = io or [0] * len(cpu_s)
    return [
        attrs.evolve(sample, children={9: ChildProcess(int(used * SECOND), 0, bytes_, state, "work")}, **facts)
        for sample, used, bytes_ in zip(samples, cpu_s, io, strict=True)
    ]


def test_stillness_begins_when_a_child_has_done_its_work():
    """A subprocess that computed for 40 s and then rests for 10 s has not been still for 50 s."""
    cpu_s = [*range(41), *[40] * 10]
    samples = with_child(seconds(*[STILL] * 50, on=On.CHILD), *cpu_s)
    assert tracked(samples[:41]).activity().kind is Kind.BUSY
    found = tracked(samples).activity()
    assert found.kind is Kind.STUCK
    assert found.still_s <= 10.0


def test_a_subprocess_that_uploads_is_work_also_where_its_output_is_polled():
    """`subprocess.run(..., capture_output=True)` waits in a selector, and the child moves megabytes at little CPU."""
    samples = with_child(
        seconds(*[STILL] * 9, on=On.POLL), *[0.06 * n for n in range(10)], io=range(0, 50 << 20, 5 << 20)
    )
    stack = [
        (
            9 * SECOND,
            ("/usr/lib/python3.11/selectors.py:415 select", "/usr/lib/python3.11/subprocess.py:2115 _communicate"),
        )
    ]
    assert tracked(samples, stack).activity().kind is Kind.BUSY


def test_a_talking_child_beside_the_one_that_is_waited_for_is_no_work():
    """A tracker's process writes a hundred bytes a second for ever."""
    samples = with_child(seconds(*[STILL] * 9, on=On.CHILD), *[0.001 * n for n in range(10)], io=range(0, 1000, 100))
    assert tracked(samples).activity().kind is Kind.STUCK


def test_a_call_that_is_not_known_proves_nothing():
    """A file system in user space may upload in close(): what is not known is not called stuck."""
    assert tracked(seconds(*[STILL] * 9, on=On.OTHER)).activity().kind is Kind.UNKNOWN
    found = tracked(seconds(*[STILL] * 9, on=On.FILE)).activity()
    assert (found.kind, found.waits_idly) == (Kind.STUCK, True)


def test_long_sleeps_in_a_loop_are_polling():
    """`while not ready(): time.sleep(30)` never stands still for a minute."""
    wake = (30_000, 1, 0)
    for seconds_later in range(31, 200):
        steps = [wake if second % 30 == 0 else STILL for second in range(seconds_later)]
        found = tracked(seconds(*steps, on=On.SLEEP)).activity()
        assert found.kind is Kind.POLLING or found.still_s < 60.0


def test_who_stops_polling_is_stuck():
    """Twice as long as it ever slept before, and not a moment of it counts that lay before the last wake-up."""
    wake = (30_000, 1, 0)
    found = tracked(seconds(*[wake] * 20, *[STILL] * 30, on=On.SLEEP)).activity()
    assert (found.kind, found.still_s) == (Kind.STUCK, 30.0)


def test_after_a_stop_stillness_begins_anew():
    """A rank that was stopped for long and goes on into a lock has not been stuck since."""
    samples = seconds(*[STILL] * 30)
    stopped = [attrs.evolve(sample, state="T") for sample in samples[:25]]
    assert tracked(stopped).is_still
    found = tracked([*stopped, *samples[25:]]).activity()
    assert (found.kind, found.still_s) == (Kind.STUCK, 5.0)


def test_what_our_own_question_moves_is_left_out():
    """A rank whose GIL is held writes its stack in a signal handler of its stuck thread: it stays stuck."""
    tracker = ActivityTracker()
    for number, sample in enumerate(seconds(WORK, *[STILL] * 4, (2_000_000, 1, 4000), *[STILL] * 4)):
        if number == 6:
            tracker.note_disturbance()
        tracker.add(sample)
    found = tracker.activity()
    assert (found.kind, found.still_s) == (Kind.STUCK, 9.0)


def test_who_polls_for_a_stopped_child_does_not_work():
    """A DataLoader looks after its workers every 5 s, which may cost more than a millisecond on a loaded machine."""
    worker = ChildProcess(10**9, 0, 0, "T", "pt_data_worker")
    poll = (3_000_000, 1, 0)
    samples = seconds(WORK, *([STILL] * 4 + [poll]) * 12, on=On.POLL, children={7: worker})
    found = tracked(samples).activity()
    assert (found.kind, found.still_s) == (Kind.STUCK, 60.0)
    working = [attrs.evolve(s, children={7: attrs.evolve(worker, state="S")}) for s in samples]
    assert tracked(working).activity().kind is Kind.BUSY


@pytest.mark.parametrize(("state", "on"), [("T", On.STOPPED_CHILD), ("t", On.TRACED_CHILD)])
def test_a_debugger_at_a_child_is_told_from_a_signal(state, on):
    """By the process state: whoever reads a worker's stack in a debugger must not lose his job over it."""
    worker = ChildProcess(10**9, 0, 0, state, "pt_data_worker")
    found = tracked(seconds(WORK, *[STILL] * 30, on=On.PIPE, children={7: worker})).activity()
    assert (found.kind, found.on) == (Kind.STUCK, on)
    assert f"(process state {state})" in found.detail


def test_time_in_which_nobody_looked_does_not_count():
    """A machine that slept, or a monitor that starved, has seen nothing: two minutes count as three seconds."""
    first, second, *_ = seconds(STILL, STILL)
    later = attrs.evolve(second, at_ns=120 * SECOND)
    assert tracked([first, second, later]).activity().still_s == pytest.approx(4.0)


def test_a_rank_that_gets_no_processor_works():
    """Time in the run queue is no stillness: the machine is loaded, the rank is not stuck."""
    samples = seconds(*[STILL] * 6)
    starved = [
        attrs.evolve(
            sample,
            beating=attrs.evolve(sample.beating, cpu_ns=10**9 + number * 20_000_000, queued_ns=number * 800_000_000),
        )
        for number, sample in enumerate(samples)
    ]
    assert tracked(starved).activity().kind is Kind.BUSY


def test_burning_with_a_stack_that_stays_is_spinning():
    """Four equal stacks in a row; one that differs begins the count anew."""
    samples = seconds(*[WORK] * 8)
    same = [(n * 5 * SECOND, ("train.py:3 spin", "train.py:9 main")) for n in range(5)]
    found = tracked(samples, same).activity()
    assert (found.kind, found.still_s) == (Kind.SPINNING, 20.0)
    other = (25 * SECOND, ("train.py:4 spin", "train.py:9 main"))
    assert tracked(samples, [*same, other]).activity().kind is Kind.BUSY


def test_burning_without_an_answer_is_unknown():
    """Something holds the GIL: a long call in C and a spinning one look alike."""
    assert tracked(seconds(*[WORK] * 8), [(8 * SECOND, None)]).activity().kind is Kind.UNKNOWN


def test_what_a_pool_computes_is_waited_for_where_the_stack_says_so():
    """Another thread that works more than it always has, under Future.result(), is work of the rank."""
    samples = [
        attrs.evolve(sample, others={7: OtherThread(10**9 + number * 900_000_000, 0, 1000.0)})
        for number, sample in enumerate(seconds(*[STILL] * 6))
    ]
    assert tracked(samples).activity().kind is Kind.UNKNOWN
    waits = [(6 * SECOND, ("/usr/lib/python3.11/threading.py:327 wait", "/x/concurrent/futures/_base.py:451 result"))]
    assert tracked(samples, waits).activity().kind is Kind.BUSY


def test_inside_a_call_of_the_device_nothing_is_known():
    """A lock of the driver looks like any other; Python's own locks, and a flight record, tell it apart."""
    samples = seconds(*[STILL] * 8, uses_device=True)
    assert tracked(samples).activity().kind is Kind.UNKNOWN
    assert tracked(samples).activity(is_named=True).kind is Kind.STUCK
    in_lock = [(8 * SECOND, ("/usr/lib/python3.11/threading.py:327 wait", "train.py:3 f"))]
    assert tracked(samples, in_lock).activity().kind is Kind.STUCK


def test_a_mutex_is_no_call_of_the_device():
    """Seen on an H100: what waits for it spins, or waits for a condition. A thread that works may yet let it go."""
    samples = seconds(*[STILL] * 8, on=On.MUTEX, uses_device=True)
    assert tracked(samples).activity().kind is Kind.STUCK
    works = [
        attrs.evolve(sample, others={7: OtherThread(10**9 + number * 900_000_000, 0, 1000.0)})
        for number, sample in enumerate(samples)
    ]
    assert tracked(works).activity().kind is Kind.UNKNOWN


def test_the_kernel_holds_it():
    """State D may end by itself, and no signal ends it: unknown."""
    samples = [attrs.evolve(sample, state="D") for sample in seconds(*[STILL] * 8)]
    assert tracked(samples).activity().kind is Kind.UNKNOWN


@pytest.mark.parametrize("blind", [[], seconds()], ids=["no sample", "one sample"])
def test_too_little_is_unknown(blind):
    """No verdict rests on a single look."""
    assert tracked(blind).activity().kind is Kind.UNKNOWN


def test_files_of_proc_that_cannot_be_read_are_unknown():
    """A hardened kernel shows nothing of other processes."""
    samples = [ActivitySample(n * SECOND, "S", None) for n in range(9)]
    assert tracked(samples).activity().kind is Kind.UNKNOWN


# -- what holds for any sequence

shares = st.floats(0.0, 1.0)


@st.composite
def housekeeping(draw):
    """A still rank beside threads that keep to their own pace, whatever it is, and a chattering child."""
    steps = draw(st.integers(4, 12))
    pace = draw(st.dictionaries(st.integers(100, 120), shares, max_size=4))
    age_s = 1000.0
    cpu = {tid: int(share * age_s * SECOND) for tid, share in pace.items()}
    child_ns, child_io = 0, 0
    on = draw(st.sampled_from((On.LOCK, On.SLEEP)))
    samples = []
    for number, sample in enumerate(seconds(*[STILL] * steps, on=on)):
        if number:
            cpu = {tid: used + int(pace[tid] * draw(st.floats(0.3, 1.8)) * SECOND) for tid, used in cpu.items()}
            child_ns += draw(st.integers(0, 50_000_000))
            child_io += draw(st.integers(0, 100_000))
        others = {tid: OtherThread(used, 0, age_s) for tid, used in cpu.items()}
        children = {9: ChildProcess(child_ns, 0, child_io, "S", "chatter")}
        samples.append(attrs.evolve(sample, others=others, children=children))
    return samples


@given(housekeeping())
@settings(max_examples=150)
def test_housekeeping_alone_never_makes_a_rank_busy(samples):
    """Watchdogs, loggers and trackers at their own background rate are no movement of the rank."""
    found = tracked(samples).activity()
    assert found.kind in (Kind.STUCK, Kind.UNKNOWN)
    assert found.still_s <= len(samples) - 1


@given(st.lists(st.sampled_from([WORK, (5_000_000, 1, 0), (0, 1, 4096), (0, 9, 10**6)]), min_size=4, max_size=40))
def test_a_rank_that_works_in_every_second_is_never_still(steps):
    """Computing, short bursts, small and large I/O: each second of it ends the stillness."""
    tracker = ActivityTracker()
    for number, sample in enumerate(seconds(*steps)):
        tracker.add(sample)
        found = tracker.activity()
        assert found.still_s == 0.0
        assert number < 3 or found.kind is Kind.BUSY


@given(st.integers(4, 60), st.integers(1, 200))
def test_wake_ups_without_work_are_no_movement(length, wakes):
    """A loop of short sleeps is still, and polls: it is not busy, and not stuck either."""
    found = tracked(seconds(*[(wakes * 30_000, wakes, 0)] * length, on=On.SLEEP)).activity()
    assert found.kind is Kind.POLLING
    assert found.still_s == length


def with_thread(samples, *cpu_s, age_s):
    """These samples, with another thread that has used so much CPU time by each; `age_s` at the first."""
    return [
        attrs.evolve(sample, others={8: OtherThread(int(used * SECOND), 0, age_s)})
        for sample, used in zip(samples, cpu_s, strict=True)
    ]


RESULT = [(9 * SECOND, ("/usr/lib/python3.11/threading.py:327 wait", "/x/concurrent/futures/_base.py:451 result"))]


def test_a_pool_that_was_started_here_and_computes_is_work():
    """`ThreadPoolExecutor().submit(evaluate).result()`: what it has always used is the evaluation."""
    samples = with_thread(seconds(*[STILL] * 9), *[2.0 + n for n in range(10)], age_s=2.0)
    tracker = ActivityTracker(since_ns=samples[0].at_ns - 2 * SECOND)
    for sample in samples:
        tracker.add(sample)
    tracker.note_stack(*RESULT[0])
    assert tracker.activity().kind is Kind.BUSY


def test_a_thread_that_was_started_here_and_uploads_is_waited_for():
    """At a hundredth of a core, and under whatever lock: sockets are not seen. Five minutes, not one."""
    samples = with_thread(seconds(*[STILL] * 9), *[0.02 + 0.01 * n for n in range(10)], age_s=2.0)
    for since_ns, on in ((samples[0].at_ns - 2 * SECOND, On.WORKER), (None, On.LOCK)):
        tracker = ActivityTracker(since_ns)
        for sample in samples:
            tracker.add(sample)
        found = tracker.activity()
        assert (found.kind, found.on, found.waits_idly) == (Kind.STUCK, on, on is On.WORKER)


def test_housekeeping_that_waits_for_processors_says_nothing_about_a_stuck_rank():
    """Three hundredths of a core as always, and five times that in the queue of a loaded machine."""
    samples = [
        attrs.evolve(sample, others={8: OtherThread(30_000_000 * n, 150_000_000 * n, 1000.0)})
        for n, sample in enumerate(seconds(*[STILL] * 9), 1000)
    ]
    assert tracked(samples).activity().kind is Kind.STUCK


def test_one_wake_up_is_no_polling():
    """A signal came at 50 s: stillness is counted from then on, and nothing longer is granted."""
    wake = (30_000, 1, 0)
    found = tracked(seconds(*[STILL] * 50, wake, *[STILL] * 20)).activity()
    assert (found.kind, found.still_s) == (Kind.STUCK, 20.0)


def test_a_rank_whose_beating_thread_has_no_stack_does_not_spin():
    """It has answered, and what it computes in is not known: work is work."""
    burning = (900_000_000, 0, 0)
    stacks = [(number * SECOND, ()) for number in range(1, 9)]
    assert tracked(seconds(*[burning] * 9), stacks).activity().kind is Kind.BUSY


def test_who_receives_beside_a_stopped_child_works():
    """The child is not what it waits for."""
    child = ChildProcess(10**9, 0, 0, "T", "helper")
    samples = seconds(*[(30_000, 3, 0)] * 9, on=On.SOCKET, children={7: child})
    assert tracked(samples).activity().kind is Kind.BUSY


# -- waits that end by themselves, and threads that may be waited for


def until(samples, *ends_s):
    """These samples, in each of which the wait ends at so many seconds; None: never."""
    ends_s = ends_s * len(samples) if len(ends_s) == 1 else ends_s
    return [
        attrs.evolve(sample, end_ns=None if end_s is None else int(end_s * SECOND))
        for sample, end_s in zip(samples, ends_s, strict=True)
    ]


@pytest.mark.parametrize("on", [On.SLEEP, On.LOCK, On.MUTEX])
def test_a_wait_with_an_end_is_told_with_it(on):
    """And since when the rank has not worked: a wake-up is no work."""
    wake = (30_000, 1, 0)
    found = tracked(until(seconds(WORK, *[STILL] * 4, wake, *[STILL] * 4, on=on), 90.0)).activity()
    assert (found.kind, found.on, found.ends_in_s, found.worked_s) == (Kind.STUCK, on, 80.0, 9.0)


@pytest.mark.parametrize("on", [On.SOCKET, On.PIPE, On.POLL, On.CHILD, On.FILE, On.FILE_LOCK])
def test_a_time_out_elsewhere_promises_nothing(on):
    """Of descriptors, children and files."""
    assert tracked(until(seconds(WORK, *[STILL] * 9, on=on), 90.0)).activity().ends_in_s is None


def test_a_time_out_of_a_collective_or_of_a_wait_for_a_worker_promises_nothing():
    """gloo waits on a condition with the time of its process group; `join(90)` looks after a thread."""
    samples = until(seconds(WORK, *[STILL] * 9), 90.0)
    assert tracked(samples).activity(in_collective=True).ends_in_s is None
    found = tracked(samples, RESULT).activity()
    assert (found.on, found.ends_in_s) == (On.WORKER, None)


def test_a_loop_of_asyncio_that_waits_for_a_time():
    """It polls for its own wake-ups only; one that also waits for a socket is not known to end."""
    loop = [(9 * SECOND, ("/usr/lib/python3.11/selectors.py:1 select", "/usr/lib/asyncio/base_events.py:2 _run_once"))]
    alone = until(seconds(WORK, *[STILL] * 9, on=On.POLL, polls_one=True), 90.0)
    assert tracked(alone, loop).activity().ends_in_s == 80.0
    assert tracked([attrs.evolve(s, polls_one=False) for s in alone], loop).activity().ends_in_s is None
    assert tracked(alone).activity().ends_in_s is None


def test_a_sleep_that_has_ended_is_nothing_that_was_survived():
    """Else a lock at the same place would have three times as long as the sleep."""
    tracker = ActivityTracker()
    wake = (30_000, 1, 0)
    for sample in until(seconds(WORK, *[STILL] * 29, wake, *[STILL] * 9, on=On.SLEEP), *[30.0] * 31, *[None] * 10):
        tracker.add(sample)
        tracker.activity()
    assert tracker.survived_s == 0.0
    assert tracker.longest_s == 9.0, "of the lock"


def test_a_wait_that_has_ended_is_remembered_until_there_is_work():
    """It slept until 5 s and stands in a lock since."""
    wake = (30_000, 1, 0)
    ends_s = (*[5.0] * 6, *[None] * 9)
    assert tracked(until(seconds(WORK, *[STILL] * 4, wake, *[STILL] * 8), *ends_s)).activity().woke_s == 9.0
    cut = until(seconds(WORK, *[STILL] * 4, wake, *[STILL] * 8), *[50.0] * 6, *[None] * 9)
    assert tracked(cut).activity().woke_s is None
    works = until(seconds(WORK, *[STILL] * 4, wake, WORK, *[STILL] * 7), *ends_s)
    assert tracked(works).activity().woke_s is None


EVENT = ("/usr/lib/python3.11/threading.py:327 wait", "/usr/lib/python3.11/threading.py:629 wait", "/home/me/t.py:4 f")
UPLOADS = ThreadStack(5, "uploader", False, ("/home/me/client.py:12 fetch",), native_id=8)
BAR = ThreadStack(6, "bar", False, ("/usr/lib/python3.11/site-packages/tqdm/_monitor.py:60 run",), native_id=9)


def beside(wait, *threads, on=On.LOCK):
    """A tracker of a rank that has stood in an Event for 39 s, beside threads that wait so."""
    tracker = ActivityTracker(0, horizon_s=600.0)
    for number, sample in enumerate(seconds(WORK, *[STILL] * 39, on=on)):
        if number == 5:
            tracker.note_stack(number * SECOND, EVENT, threads)
        tracker.add(attrs.evolve(sample, workers=dict.fromkeys(tracker.workers, wait)))
    return tracker


@pytest.mark.parametrize("on", [On.LOCK, On.MUTEX])
def test_a_lock_beside_a_thread_that_works_outside_has_its_patience(on):
    """Whatever started it, and when; the thread is named."""
    found = beside(Wait(On.SOCKET), UPLOADS, BAR, on=on).activity()
    assert (found.kind, found.on, found.waits_idly) == (Kind.STUCK, On.WORKER, True)
    assert "thread 'uploader', which waits on a socket at client.py:12 in fetch" in found.detail


@pytest.mark.parametrize(
    ("wait", "threads"),
    [(Wait(On.SOCKET), (BAR,)), (Wait(On.LOCK), (UPLOADS,)), (Wait(On.SLEEP, 700 * SECOND), (UPLOADS,))],
    ids=["housekeeper", "a lock itself", "a watchdog's timer"],
)
def test_a_lock_beside_what_does_not_come_is_a_lock(wait, threads):
    """A bar, a thread that waits for the same lock, a timer that lies too far ahead."""
    found = beside(wait, *threads).activity()
    assert (found.on, found.waits_idly) == (On.LOCK, False)


def test_a_thread_that_was_seen_once_and_answers_no_more_is_not_counted():
    """Something holds the GIL: no thread of Python will release the lock."""
    tracker = beside(Wait(On.SOCKET), UPLOADS)
    tracker.note_stack(41 * SECOND, None)
    assert tracker.activity().on is On.WORKER, "a busy machine may answer late, once"
    tracker.note_stack(46 * SECOND, None)
    assert tracker.activity().on is On.LOCK


def test_one_question_without_an_answer_takes_no_patience_from_a_future():
    """The stack says what it waits for; that holds until it is asked again."""
    tracker = tracked(seconds(WORK, *[STILL] * 9))
    tracker.note_stack(*RESULT[0])
    tracker.note_stack(14 * SECOND, None)
    assert tracker.activity().on is On.WORKER
    tracker.note_stack(19 * SECOND, None)
    assert tracker.activity().on is On.LOCK


def test_a_timer_that_lasts_has_its_time_and_a_ticking_thread_has_not():
    """`Timer(400)` ends in one wait; a thread that sleeps a second at a time is always about to wake up."""
    found = beside(Wait(On.LOCK, 400 * SECOND, since_ns=0), UPLOADS).activity()
    assert (found.on, found.ends_in_s) == (On.WORKER, 360.0)
    ticks = beside(Wait(On.SLEEP, 42 * SECOND, since_ns=39 * SECOND), UPLOADS).activity()
    assert (ticks.on, ticks.ends_in_s) == (On.WORKER, None)


def test_a_thread_that_keeps_house_is_not_taken_for_one_that_was_started_here():
    """A bar is drawn in this step, and a lock never comes."""
    samples = with_thread(seconds(*[STILL] * 9), *[0.02 + 0.01 * n for n in range(10)], age_s=2.0)
    tracker = ActivityTracker(samples[0].at_ns - 2 * SECOND)
    tracker.note_stack(0, EVENT, (attrs.evolve(BAR, native_id=8),))
    for sample in samples:
        tracker.add(sample)
    assert tracker.activity().on is On.LOCK
