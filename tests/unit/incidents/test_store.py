"""Incidents on disk: whole or not there, one number each, readable by people and by older versions."""

import json
import os
import stat
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.incidents import ACTIONS, KINDS, Culprit, Evidence, Incident, IncidentStore

STABLE_KEYS = {
    "id", "kind", "attempt", "detected_at", "detection_latency_s", "culprits", "victims", "category", "cause",
    "action", "confidence", "evidence", "recovered_at", "recovery_s", "lost_steps",
}  # fmt: skip

numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
integers = st.none() | st.integers()
texts = st.none() | st.text()
incidents = st.builds(
    Incident,
    id=texts,
    kind=st.none() | st.sampled_from(KINDS),
    attempt=integers,
    detected_at=numbers,
    detection_latency_s=numbers,
    culprits=st.lists(
        st.builds(
            Culprit,
            rank=st.integers(),
            node=texts,
            step=integers,
            section=texts,
            stack=st.lists(st.text()).map(tuple),
        )
    ).map(tuple),
    victims=st.lists(st.integers()).map(tuple),
    category=texts,
    cause=texts,
    action=st.none() | st.sampled_from(ACTIONS),
    confidence=st.none() | st.floats(0, 1),
    evidence=st.lists(st.builds(Evidence, source=st.text(min_size=1), text=st.text())).map(tuple),
    recovered_at=numbers,
    recovery_s=numbers,
    lost_steps=integers,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(sorted(STABLE_KEYS)) | st.text(), inner),
    max_leaves=20,
)


def an_incident(**changes) -> Incident:
    values = {
        "attempt": 0,
        "detected_at": 1_700_000_000.0,
        "detection_latency_s": 2.25,
        "culprits": (Culprit(1, "node-a", 40, "bwd", ("model.py:3 forward", "train.py:9 main")),),
        "victims": (0, 2, 3, 4),
        "category": "hang",
        "cause": "hang_rank_stopped",
        "action": "restart",
        "confidence": 0.9,
        "evidence": (Evidence("proc", "rank 1 is stopped (state T)"),),
    }
    return Incident(**{**values, **changes})


@given(incidents)
def test_a_record_survives_json(incident):
    """Writing and reading gives the same record, with every stable key there."""
    data = json.loads(json.dumps(incident.to_json()))
    assert set(data) == STABLE_KEYS
    assert Incident.from_json(data) == incident


@given(json_values)
def test_reading_never_fails(data):
    """Whatever is in the file, the result is a record that can be written again."""
    incident = Incident.from_json(data)
    assert Incident.from_json(json.loads(json.dumps(incident.to_json(), allow_nan=False))) == incident


def test_numbers_that_json_does_not_have_become_null():
    """NaN is not JSON: a confidence that came out as NaN is a missing one."""
    assert an_incident(confidence=float("nan")).to_json()["confidence"] is None


def test_create_writes_the_whole_directory(tmp_path):
    """report.json, report.md, stacks and pages are there, private, and nothing temporary is left."""
    incident = IncidentStore(tmp_path).create("hang", an_incident(), {1: "main\x1b[31m"}, {1: {"step": 40}})
    directory = tmp_path / "incidents" / "0001-hang"
    assert incident.id == "0001-hang"
    files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    assert files == ["pages/rank-1.json", "report.json", "report.md", "stacks/rank-1.txt"]
    assert "\x1b" not in (directory / "stacks" / "rank-1.txt").read_text()
    assert all(stat.S_IMODE(p.stat().st_mode) & 0o077 == 0 for p in [directory, *directory.rglob("*")])
    assert os.listdir(tmp_path / "incidents") == ["0001-hang"]
    assert IncidentStore(tmp_path).all() == [incident]


def test_a_group_readable_run_has_group_readable_incidents(tmp_path):
    """The `incidents` directory decides, whatever the umask is."""
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents").chmod(0o750)
    IncidentStore(tmp_path).create("crash", an_incident())
    report = tmp_path / "incidents" / "0001-crash" / "report.json"
    assert stat.S_IMODE(report.stat().st_mode) == 0o640
    assert stat.S_IMODE(report.parent.stat().st_mode) == 0o750


WRITER = """
import sys
from resilience_sdk.incidents import Incident, IncidentStore
sys.stdin.readline()
for _ in range(15):
    IncidentStore(sys.argv[1]).create(sys.argv[2], Incident())
"""


def test_two_writers_at_once_never_share_a_number(tmp_path):
    """A crash and a hang found by two processes at one moment get different numbers, none is lost."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), kind], stdin=subprocess.PIPE, text=True)
        for kind in ("hang", "crash")
    ]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
    found = IncidentStore(tmp_path).all()
    assert sorted(int(i.id[:4]) for i in found) == list(range(1, 31))
    assert {i.kind for i in found} == {"hang", "crash"}


def test_writers_who_see_the_same_at_once_leave_one_report(tmp_path):
    """Two monitors that find a third node silent at one moment: one writes, all return what was written."""
    script = (
        "import sys\n"
        "from resilience_sdk.incidents import Culprit, Incident, IncidentStore\n"
        "store = IncidentStore(sys.argv[1])\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "for attempt in range(20):\n"
        "    seen = Incident(kind='hang', attempt=attempt, culprits=(Culprit(rank=2),))\n"
        "    found, new = store.create_once('hang', seen, same=lambda other: other.attempt == attempt)\n"
        "    print(found.id, int(new))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipe) as one, subprocess.Popen(command, **pipe) as other:
        for writer in (one, other):
            writer.stdout.readline()
        for writer in (one, other):
            writer.stdin.write("\n")
            writer.stdin.flush()
        told = [[line.split() for line in writer.stdout.read().splitlines()] for writer in (one, other)]
    assert [a for a, _ in told[0]] == [b for b, _ in told[1]]
    assert all(int(a) + int(b) == 1 for (_, a), (_, b) in zip(*told, strict=True))
    assert len(IncidentStore(tmp_path).all()) == 20


def test_another_incident_of_that_kind_is_not_taken_for_the_same(tmp_path):
    """What `same` does not hold for, and other kinds, stand beside it."""
    store = IncidentStore(tmp_path)
    first, _ = store.create_once("hang", an_incident(attempt=0), same=lambda other: True)
    assert store.create_once("hang", an_incident(attempt=1), same=lambda other: other.attempt == 1)[1]
    assert store.create_once("crash", an_incident(), same=lambda other: True)[1]
    assert store.create_once("hang", an_incident(), same=lambda other: other.attempt == 0) == (first, False)


def test_a_writer_that_died_costs_a_number_and_nothing_else(tmp_path):
    """Its hidden directory is no incident, and its number is not used again."""
    (tmp_path / "incidents" / ".0001").mkdir(parents=True)
    store = IncidentStore(tmp_path)
    assert store.all() == []
    assert store.create("hang", an_incident()).id == "0002-hang"


def test_update_and_recovery(tmp_path):
    """An incident is open until the run goes on; then it says when and how long it took."""
    store = IncidentStore(tmp_path)
    store.create("hang", an_incident())
    store.create("crash", an_incident(action="stop"))
    assert [i.id for i in store.open_recoveries()] == ["0001-hang"]
    store.mark_recovered("0001-hang", 1_700_000_004.5, lost_steps=7)
    assert store.open_recoveries() == []
    recovered = store.get("0001-hang")
    assert (recovered.recovery_s, recovered.lost_steps) == (4.5, 7)
    assert "4.5 s after the detection" in (store.path / "0001-hang" / "report.md").read_text()


def test_update_refuses_what_is_not_there(tmp_path):
    """Unknown ids, paths in disguise and unknown fields are the caller's errors."""
    store = IncidentStore(tmp_path)
    store.create("hang", an_incident())
    for wrong in ("0002-hang", "../incidents/0001-hang", ""):
        with pytest.raises(KeyError):
            store.update(wrong, attempt=1)
    with pytest.raises(TypeError):
        store.update("0001-hang", colour="red")
    with pytest.raises(ValueError, match="none of crash, hang"):
        store.create("oops", an_incident())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_an_unreadable_report_is_shown_not_hidden(tmp_path, content):
    """The incident is in the list, named by its directory, and says that its report is broken."""
    store = IncidentStore(tmp_path)
    store.create("hang", an_incident())
    (store.path / "0001-hang" / "report.json").write_bytes(content)
    (broken,) = store.all()
    assert (broken.id, broken.kind) == ("0001-hang", "hang")
    assert "cannot be read" in broken.evidence[0].text


def test_secrets_do_not_reach_the_disk(tmp_path):
    """Fields by name, passwords in URLs, and assignments inside messages are redacted."""
    texts = "WANDB_API_KEY=abc123 https://u:hunter2@host/"
    incident = an_incident(evidence=(Evidence("exception", texts),))
    IncidentStore(tmp_path).create("crash", incident, pages={0: {"api_token": "abc123"}})
    written = "".join(p.read_text() for p in (tmp_path / "incidents").rglob("*") if p.is_file())
    assert "abc123" not in written
    assert "hunter2" not in written


def test_no_run_directory_no_incidents(tmp_path):
    """Looking at a run that has none is not an error."""
    assert IncidentStore(tmp_path / "nowhere").all() == []


def test_records_are_values():
    """Nobody can change an incident behind the store's back."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        an_incident().cause = "x"


def test_what_the_ranks_told_of_bad_numbers_stands_for_their_end(tmp_path):
    """Of this attempt and job only, and not where the training went on (action `none`)."""
    store = IncidentStore(tmp_path)
    at = {"detected_at": 100.0, "category": "numerics", "cause": "nan_loss"}
    ended = store.create("numerics", Incident(attempt=1, action="rollback", **at))
    store.create("numerics", Incident(attempt=1, action="none", **at))
    store.create("crash", Incident(attempt=1, action="restart", **at))
    assert store.bad_numbers(1, 99.0, "resilience_sdk.errors.NumericsError") == ended
    assert store.bad_numbers(1, 99.0, "ValueError") is None
    assert store.bad_numbers(1, 101.0, "NumericsError") is None
    assert store.bad_numbers(0, 99.0, "NumericsError") is None


def _told_by(run_dir, attempt, rank, *faults, pid=7):
    """Write what a rank of an attempt journals, with the faults that were injected into it."""
    journal = run_dir / "journal"
    journal.mkdir(exist_ok=True)
    start = {"t": float(pid), "event": "rank_start", "attempt": attempt, "rank": rank}
    struck = [{**start, "event": "fault_injected", "by": by, "step": step} for by, step in faults]
    text = "".join(json.dumps(event) + "\n" for event in (start, *struck))
    (journal / f"host-rank{rank}-{pid}.jsonl").write_text(text)


def test_an_injected_fault_of_a_culprit_is_evidence_and_nothing_else_of_the_verdict(tmp_path):
    """Of this attempt, of the culprits, and of the newest process that was that rank: an earlier job's was another."""
    by = "RESILIENCE_FAULT=kill:rank=1,step=3"
    _told_by(tmp_path, 0, 0, ("RESILIENCE_FAULT=slow:rank=0,seconds=1", 2))
    _told_by(tmp_path, 0, 1, (by, 3))
    _told_by(tmp_path, 1, 2, (by, 3))
    _told_by(tmp_path, 0, 3, (by, 3), pid=7)
    _told_by(tmp_path, 0, 3, pid=8)
    plain = an_incident(culprits=tuple(Culprit(rank=rank) for rank in (1, 2, 3)))
    written = IncidentStore(tmp_path).create("crash", plain)
    note = Evidence("fault", f"injected by {by}, which struck rank 1 at step 3")
    assert written.evidence == (*plain.evidence, note)
    assert attrs.evolve(written, id=plain.id, kind=plain.kind, evidence=plain.evidence) == plain


def test_a_journal_that_cannot_be_read_keeps_no_incident_from_being_written(tmp_path):
    """It may be torn, or hold a directory in a file's place."""
    (tmp_path / "journal" / "host-rank1-7.jsonl").mkdir(parents=True)
    (tmp_path / "journal" / "host-rank1-8.jsonl").write_bytes(b'{"event": "fault_injected"\n\xff\n[]\n')
    plain = an_incident(culprits=(Culprit(rank=1),))
    assert IncidentStore(tmp_path).create("crash", plain).evidence == plain.evidence
