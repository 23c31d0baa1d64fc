"""What the bench of the peers takes for a name, for going on, and for an end."""

import json
from pathlib import Path

import pytest

from tests.bench.peers import page, watching
from tests.bench.peers.facts import FACTS
from tests.bench.peers.programs.plan import STRIKE_AT
from tests.bench.peers.systems import SYSTEMS, Job

KILLED = [
    (0.04, "[rank0]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:16775: Connection reset by peer."),
    (0.27, "E1129 01:52:20.703000 3734 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 3786) of binary: python"),
]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (KILLED[0][1], ["0"]),
        (KILLED[1][1], ["1"]),
        ("  rank      : 1 (local_rank: 1)", ["1"]),
        ("resilience: HANG: rank 1 on node7 stands still at step 40", ["1"]),
        ("[ERROR] failed to connect, retry=1, rank=1, size=2, local=[127.0.0.1]:4293", []),
        ("[2026] [WARNING] [RankMonServer12@node:1] Did not get subsequent heartbeat. Waited 10.5 seconds.", ["1"]),
        ("[2026] [INFO] [RankMonServer12@node:1] Started periodic restart check.", []),
        ("Why: R1/N0 waited 254.5 ms for input", ["1"]),
        ("group 1: E1129 02:31:03 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 16338) of binary", ["1"]),
        ("group 0: RuntimeError: timed out", ["0"]),
        ("group 0: INFO:torchft.manager:[train_ddp_0:a5/0 - step 50] reconfiguring for rank 0", []),
        ("global_ranks=[0, 1]", []),
    ],
)
def test_a_rank_is_named_by_its_number(line, named):
    assert list(watching._ranks([(1.0, line)])) == named


def test_the_first_mention_of_each_rank_counts_and_keeps_its_place():
    """A victim that is named first stands first."""
    assert watching._ranks([*KILLED, (9.0, "rank 0 again")]) == {"0": 0.04, "1": 0.27}


def test_the_words_for_what_happened():
    assert watching._first(KILLED, watching.CAUSES["killed"]) == 0.27
    assert watching._first(KILLED, watching.CAUSES["asleep"]) is None
    assert watching._first([(2.0, 'File "PROGRAMS/scene.py", line 64 in _sleep')], watching.LINE) == 2.0
    assert watching._first([(2.0, "at PROGRAMS/scene.py:64 _sleep")], watching.LINE) == 2.0


def test_going_on_is_a_step_that_the_fault_did_not_allow():
    """The last step before it, which the other rank completes a little later, is none."""
    stamps = [
        (1.0, 10, 0, f"step {STRIKE_AT - 2}"),
        (1.0, 11, 1, f"step {STRIKE_AT - 1}"),
        (2.0, 11, 1, "strike"),
        (2.1, 10, 0, f"step {STRIKE_AT - 1}"),
        (5.0, 12, 0, "step 0"),
        (7.0, 10, 0, f"step {STRIKE_AT}"),
    ]
    assert watching._went_on(stamps, 2.0) == {"0": 3.0}
    assert watching._went_on([*stamps[:4], stamps[5]], 2.0) == {"0": 5.0}
    assert watching._processes(stamps) == {0: {10, 12}, 1: {11}}


def test_what_is_of_this_machine_is_hidden():
    assert watching.hide("\x1b[31m/tmp/x/run on vm: pynvml\x1b[0m", {"/tmp/x": "OUT", "vm": "node"}) == (
        "OUT/run on node: pynvml"
    )


def test_long_output_says_how_much_was_left_out():
    lines = [(float(number), f"line {number}") for number in range(100)]
    short = watching.cut(lines, first=3, last=2)
    assert [text for _, text in short] == ["line 0", "line 1", "line 2", "... 95 lines ...", "line 98", "line 99"]
    assert watching.cut(lines[:6], first=3, last=2) == lines[:6]


def test_a_job_is_ended_with_all_that_it_started(tmp_path):
    """Also what has left its session and whose parent is gone."""
    marker = tmp_path / "alive"
    script = f"(setsid sleep 300 & echo $! > {marker}); sleep 300"
    system = SYSTEMS[0]
    command = type(system.commands(Job(tmp_path, "asleep", tmp_path))[0])(["sh", "-c", script])
    process = watching._start(command, Job(tmp_path, "asleep", tmp_path), "a-tag-of-this-test")
    while not marker.exists() or not marker.read_text().strip():
        assert process.poll() is None
    orphan = int(marker.read_text())
    watching._end("a-tag-of-this-test")
    process.wait(20)
    watching._output(process).close()
    assert not Path(f"/proc/{orphan}/cmdline").exists() or not Path(f"/proc/{orphan}/cmdline").read_bytes()


SEEN = {
    "struck": 1, "ranks": {"1": 0.27}, "line_s": None, "cause_s": 0.27, "restarts": {"0": 1, "1": 1},
    "went_on_s": {"0": 4.6, "1": 4.62}, "ended_s": 25.31, "codes": [0], "output": KILLED, "commands": ["run plain.py"],
}  # fmt: skip


def test_a_row_says_who_was_named_who_went_on_and_how_it_ended():
    assert page.named(SEEN) == "rank 1, 0.27 s"
    assert page.went_on(SEEN) == "both after 4.6 s; both restarted once"
    assert page.end(SEEN, 120) == "exit code 0 after 25 s"


def test_a_row_of_nothing_says_so():
    nothing = SEEN | {"ranks": {}, "went_on_s": {}, "ended_s": None, "codes": [None], "struck": 3}
    assert page.named(nothing) == "nobody"
    assert page.went_on(nothing) == "no"
    assert page.end(nothing, 120) == "none within 120 s; struck 3 times"


def test_who_did_not_come_to_the_fault():
    missed = SEEN | {"struck": 0, "ranks": {}, "went_on_s": {}, "codes": [1]}
    assert page._row("P", missed, 120) == "| P | did not come to the fault: see below | | | | exit code 1 after 25 s |"


def test_a_group_that_goes_on_alone():
    alone = SEEN | {"restarts": {"0": 0, "1": 1}, "went_on_s": {"0": 5.1, "1": 9.3}, "codes": [0, 0]}
    assert page.went_on(alone) == "rank 0 after 5.1 s, rank 1 after 9.3 s; rank 1 restarted once"
    assert page.end(alone, 120) == "exit code 0 and 0 after 25 s"


def document(**systems):
    """Return results as a run keeps them."""
    made = {"date": "2026-11-29", "cores": 2, "cpu": "EPYC", "python": "3.11", "load": [1.0], "load_after": [2.0]}
    return {"machine": made, "limit_s": 100, "at_once": 1, "facts": {}, "systems": systems}


def test_the_page_has_every_run_with_what_was_printed():
    found = {"versions": {"torch": "2.13.0"}, "chosen": "as it comes", "faults": dict.fromkeys(page.FAULTS, SEEN)}
    text = page.text(document(torchrun=found, other={"refused": "ERROR: no\nwheel", "chosen": "", "faults": {}}))
    assert text.startswith("# Peers side by side")
    assert "{" not in text
    assert text.count("| torchrun | rank 1, 0.27 s | no | 0.27 s | both after 4.6 s; both restarted once |") == 4
    assert text.count("   0.27  E1129") == 4
    assert "| other | refused: ERROR: no wheel |" in text


def test_frames_of_libraries_are_left_out_of_the_page_and_the_line_that_failed_is_not():
    frames = [
        (0.0, '[rank1]:   File "PROGRAMS/plain.py", line 29'),
        (0.0, '[rank1]:   File "PROGRAMS/scene.py", line 68'),
    ]
    assert page._printed(frames, "exception") == ['   0.00  [rank1]:   File "PROGRAMS/scene.py", line 68']


def test_the_page_is_that_of_the_kept_results():
    """Neither is there without the other. Who could not be installed, or did not come to the fault, has said why."""
    assert page.FILE.exists() == page.PAGE.exists()
    if not page.FILE.exists():
        return
    kept = json.loads(page.FILE.read_text(encoding="utf-8"))
    assert page.PAGE.read_text(encoding="utf-8") == page.text(kept), "run: python -m tests.bench --only peers"
    assert kept["facts"] == {fact.name: True for fact in FACTS}
    assert list(kept["systems"]) == [system.name for system in SYSTEMS]
    for name, system in kept["systems"].items():
        missed = [seen for seen in system["faults"].values() if not seen["struck"]]
        assert "refused" in system or len(system["faults"]) == (1 if missed else len(page.FAULTS)), name
        assert all(seen["output"] for seen in missed), name
