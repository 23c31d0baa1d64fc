"""A rank hangs, in every way in which ranks hang: it is named, its peers are not, and the job goes on."""

import json
import time

import pytest
from accounts import account_of
from harness import job

KEYS = {
    "id", "kind", "attempt", "detected_at", "detection_latency_s", "culprits", "victims", "category", "cause",
    "action", "confidence", "evidence", "recovered_at", "recovery_s", "lost_steps",
}  # fmt: skip
DEADLINE_S, STARTUP_S = 1.5, 6.0
# What happens in which attempt; the last two are the script's own doing.
WAYS = ("sleep", "c", "gil", "stop", "outside", "start", "nested", "threads")
# Between sections that come and go a rank may be met at work, or as it wakes up and does nothing.
CAUSES = {"stop": ("hang_rank_stopped",), "nested": ("hang_rank_late", "hang_rank_spinning")}
FAULTS = """
    hang:how=sleep,rank=1,step=5,attempt=0; hang:how=c,rank=0,step=5,attempt=1;
    hang:how=gil,rank=1,step=5,attempt=2; hang:how=stop,rank=0,step=5,attempt=3;
    hang:where=outside,rank=1,step=5,attempt=4; hang:where=start,rank=1,attempt=5
"""
SCRIPT = ("training.py", "--nested", str(WAYS.index("nested")), "--threads", str(WAYS.index("threads")))
TWO = ("--nproc-per-node", "2")
DEADLINES = ("--heartbeat-timeout", str(DEADLINE_S), "--initial-heartbeat-timeout", str(STARTUP_S))


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """One job that hangs in every attempt but the last, over now, and what was left of it."""
    options = (*TWO, *DEADLINES, "--out-of-section-timeout", str(DEADLINE_S), "--max-restarts", str(len(WAYS)))
    with job(tmp_path_factory.mktemp("hung"), *options, *SCRIPT, env={"RESILIENCE_FAULT": FAULTS}) as run:
        code = run.finish()
        yield run, code, run.left_behind()


@pytest.fixture
def incident(hung, way):
    """The incident of one way to hang."""
    run, code, _ = hung
    assert code == 0, run.screen
    return run.incidents()[WAYS.index(way)]


def evidence(incident, source):
    """Return all evidence of an incident from one source."""
    return "\n".join(item["text"] for item in incident["evidence"] if item["source"] == source)


def test_every_hang_is_one_incident_and_the_job_recovers_from_each(hung):
    """Exit 0, as many incidents as hangs, each over when all ranks beat again; nothing is left behind."""
    run, code, left = hung
    assert code == 0, run.screen
    assert [found["attempt"] for found in run.incidents()] == list(range(len(WAYS)))
    for found in run.incidents():
        assert found.keys() == KEYS
        assert (found["kind"], found["category"], found["action"]) == ("hang", "hang", "restart")
        assert found["detected_at"] < found["recovered_at"] < time.time()
        assert found["recovery_s"] == pytest.approx(found["recovered_at"] - found["detected_at"])
        assert found["lost_steps"] is None  # steps are counted, not global
    assert not left
    assert len(run.events("attempt_start")) == len(WAYS) + 1
    assert len(run.events("confirmed")) == len(WAYS)
    assert not run.events("degraded")
    assert run.outcome()["verdict"] == "finished"
    assert sorted(run.out.splitlines()) == [f"rank {rank} finished attempt {len(WAYS)}" for rank in (0, 1)]
    assert "finished: all ranks exited with 0 (exit code 0)" in run.last_lines()


def test_what_hung_is_accounted_for_and_so_is_every_other_second(hung):
    """Each hang cost its deadline, but for the time until the first step was seen; to begin again cost time as well."""
    run, _, _ = hung
    buckets = account_of(run.run_dir)
    waited_s = sum(found["detection_latency_s"] for found in run.incidents())
    beaten = [found for found in run.incidents() if found["attempt"] != WAYS.index("start")]
    assert DEADLINE_S * len(beaten) * 0.5 < buckets["hang"] < waited_s
    assert buckets["restart"] > 0
    assert buckets["startup"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_the_culprit_is_named_and_its_peer_is_a_victim(hung, incident, way):
    """Rank, step, latency, on the screen and in files: report.md, a stack and a page per rank."""
    culprit = 0 if way in ("c", "stop") else 1
    run = hung[0]
    assert [named["rank"] for named in incident["culprits"]] == [culprit], incident
    assert incident["victims"] == [1 - culprit]
    assert incident["cause"] in CAUSES.get(way, ("hang_rank_stuck",))
    assert incident["culprits"][0]["step"] == (None if way == "start" else 5)
    is_injected = way not in ("nested", "threads")
    assert evidence(incident, "fault").startswith("injected by RESILIENCE_FAULT=hang" if is_injected else "")
    assert bool(evidence(incident, "fault")) == is_injected
    limit_s = {"start": STARTUP_S, "nested": 1.0}.get(way, DEADLINE_S)
    assert incident["detection_latency_s"] >= limit_s
    assert "deadline" in evidence(incident, "deadline")
    assert f"rank {culprit}" in run.incident_file(incident, "report.md")
    assert f"HANG: rank {culprit} on {incident['culprits'][0]['node']} stands still" in run.screen
    assert '"rank": 0' in run.incident_file(incident, "pages/rank-0.json")
    assert '"rank": 1' in run.incident_file(incident, "pages/rank-1.json")
    assert "training.py" in run.incident_file(incident, f"stacks/rank-{1 - culprit}.txt")


@pytest.mark.parametrize(("way", "frame"), [("sleep", "_hang"), ("c", "_deadlock"), ("gil", "_deadlock")])
def test_the_stack_shows_where_it_hangs(hung, incident, way, frame):
    """Innermost first, in Python and in C, with and without the GIL; the user's own line is among them."""
    stack = incident["culprits"][0]["stack"]
    assert stack[0].endswith(frame)
    assert any("training.py" in line for line in stack)
    assert incident["culprits"][0]["section"] == "step"
    assert frame in hung[0].incident_file(incident, f"stacks/rank-{incident['culprits'][0]['rank']}.txt")


@pytest.mark.parametrize("way", ["sleep", "c", "outside", "nested", "threads"])
def test_the_flight_record_proves_it(incident, way):
    """The culprit has not entered the collective in which the other one waits."""
    assert f" in number {7 if way == 'outside' else 6} (all_reduce" in evidence(incident, "flight")
    # That it did not come is proven; of one that still moves it is not that it will not.
    assert incident["confidence"] >= (0.5 if way == "nested" else 0.9)


@pytest.mark.parametrize("way", ["gil"])
def test_a_rank_that_holds_the_gil_could_not_answer_and_the_report_says_so(hung, incident, way):
    """Its flight record is missing, which is evidence, but no proof."""
    assert "no flight record from rank 1" in evidence(incident, "flight")
    assert "GIL" in evidence(incident, "flight")
    assert incident["confidence"] < 0.9
    assert "no flight record from rank 1" in hung[0].incident_file(incident, "report.md")


@pytest.mark.parametrize("way", ["stop"])
def test_a_stopped_rank(incident, way):
    """Process state T is proof; it cannot dump, and nobody waits for that."""
    assert "is stopped (process state T)" in evidence(incident, "proc")
    assert "cannot answer" in evidence(incident, "stack")
    assert incident["confidence"] >= 0.9


@pytest.mark.parametrize("way", ["start"])
def test_a_hang_before_the_first_beat(incident, way):
    """An explicit start-up time is a deadline even though the rank has not used the SDK yet."""
    assert f"rank 1: start-up for {STARTUP_S:.0f}." in evidence(incident, "deadline")
    assert incident["culprits"][0]["section"] is None


@pytest.mark.parametrize("way", ["outside"])
def test_a_hang_outside_of_any_section(incident, way):
    """Between two heartbeats the time out of section counts."""
    assert "rank 1: out of section" in evidence(incident, "deadline")
    assert incident["culprits"][0]["section"] is None


@pytest.mark.parametrize("way", ["nested"])
def test_an_expired_outer_section_counts_while_inner_ones_come_and_go(incident, way):
    """The rank moves for ever inside of a section that is overdue."""
    assert "rank 1: outer for 1." in evidence(incident, "deadline")
    assert any(line.endswith("never_come_back") for line in incident["culprits"][0]["stack"])


@pytest.mark.parametrize("way", ["threads"])
def test_the_beats_of_another_thread_do_not_hide_a_hang(hung, incident, way):
    """Two threads beat under names of their own, and each has a lane; the training's one hangs."""
    page = json.loads(hung[0].incident_file(incident, "pages/rank-1.json"))
    assert len(page["lanes"]) == 2
    assert page["odd_exits"] == page["lost"] == 0
