"""`resilience why` tells each fact once, whatever went wrong."""

import itertools
import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.incidents import ACTIONS, KINDS, Culprit, Evidence, Incident
from resilience_sdk.report.why_page import JobEnding, page, recovery_words

LOOP = ("/home/me/train.py:15 train_step", "/home/me/train.py:34 main", "/home/me/train.py:39 <module>")
TORCH = tuple(f"/v/lib/python3.11/site-packages/torch/nn/modules/module.py:{line} _call_impl" for line in range(30))
WAIT = "/usr/lib/python3.11/threading.py:327 wait"
STOOD = "rank 1 on n0 made no progress for 50 s at step 40 in section 'fwd' (0001-hang: hang_rank_stuck)"
ASKED = "SIGTERM to the launcher on n0"


def incident(kind, cause, *evidence, ranks=(1,), stack=LOOP, **facts):
    known = causes()[cause]
    made = {
        "id": f"0001-{kind}",
        "attempt": 0,
        "detected_at": 1.8e9,
        "culprits": tuple(Culprit(rank, "n0", 40, "fwd", stack, step_is_global=True) for rank in ranks),
        "victims": (0,),
        "confidence": 0.8,
        "action": known.action,
        **facts,
    }
    found = tuple(Evidence(source, text) for source, text in evidence)
    return Incident(kind=kind, category=known.category, cause=cause, evidence=found, **made)


def crash(cause, raised, **facts):
    """As the launcher records an exception: quoted, with who was first, how it ended, and what became of the others."""
    return incident(
        *("crash", cause),
        ("order", "rank 1 was the first to die of its own: it exited with code 1"),
        ("exception", raised),
        ("exit", "exited with code 1"),
        ("order", "the others after it: rank 0 died by SIGTERM (ended by the launcher)"),
        **facts,
    )


def killed(cause, signal, *evidence, **facts):
    return incident(
        *("crash", cause),
        ("order", f"rank 1 was the first to die of its own: it died by {signal}"),
        ("exit", f"died by {signal}"),
        *evidence,
        ("order", "the others after it: rank 0 died by SIGTERM (ended by the launcher)"),
        **facts,
    )


HANG = incident(
    *("hang", "hang_rank_stuck"),
    (
        "flight",
        f"rank 1 (n0) at step 40 in section fwd, at {WAIT} has entered 45 collectives; rank 0 waits in number 46",
    ),
    ("activity", "rank 1: its thread used no CPU time and did not wake up for 5 s, waiting on a lock"),
    ("rule", "called hung by stuck_after 5 s"),
    ("deadline", "rank 1: step for 50.30 s (deadline 30.00 s)"),
    ("proc", "rank 1 (pid 7) is asleep (state S), waiting in futex_do_wait"),
    ("kernel", "kernel stack of rank 1, innermost first: futex_do_wait < futex_wait"),
    stack=(WAIT, *LOOP),
)
STOPPED = incident(
    *("hang", "hang_rank_stopped"),
    ("proc", "rank 1 is stopped (process state T)"),
    ("activity", "rank 1: it is stopped (process state T)"),
    ("flight", "no flight record from rank 1: it is stopped (state T) and cannot answer"),
    stack=(),
)
ENDED_HANG = incident(
    *("hang", "hang_rank_stuck"),
    ("stall", f"no rank made progress for 50 s: the others waited for rank 1 on n0, which is stuck at {LOOP[0]}"),
    ("activity", "rank 1: its thread used no CPU time for 41 s"),
    ("ending", f"then it was ended: {ASKED}"),
    confidence=0.46,
)
LEFT = incident(
    *("preemption", "preemption_sigterm"),
    ("stall", STOOD),
    ("notice", ASKED),
    ("checkpoint", "the SDK saved no checkpoint; 41 steps done"),
    ("exit", "rank 0 died by SIGTERM, rank 1 died by SIGKILL"),
    ranks=(),
    id="0002-preemption",
)
PREEMPTED = incident(
    *("preemption", "preemption_requested"),
    ("notice", "resilience preempt of me@n0: maintenance"),
    ("checkpoint", "saved after 10 steps; all ranks stopped after 10 steps, 0 steps lost"),
    ("exit", "rank 0 exited with code 75, rank 1 exited with code 75"),
    ranks=(),
)
HINDERED = incident(
    *("preemption", "preemption_sigterm"),
    ("notice", ASKED),
    ("hindrance", "rank 1 did not call preemption.check() for 9 s"),
    ("checkpoint", "the newest was saved after 30 steps; 41 steps done, 11 steps lost"),
    ("cure", "call preemption.check() in the loop of rank 1"),
)
SLOW = incident(
    *("slow", "straggler_persistent"),
    ("straggler", "rank 1 (node n0): section fwd takes 2.5 times as long as the others since step 1; persistent"),
    ("cure", "rank 1 (node n0) in section fwd: look at who else uses the processors there; with a GPU its clocks too"),
    action="none",
    stack=(),
)
NAN = incident(
    *("numerics", "nan_loss"),
    ("numerics", "loss is nan at step 30 on rank 0"),
    ("numerics", "loss is nan at step 30 on rank 1"),
    ranks=(),
    victims=(),
)
OOM = crash(
    "cuda_oom",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB. " + "The rest of it is long, " * 9,
)
BUG = crash("user_code_error", "RuntimeError: mat1 and mat2 shapes cannot be multiplied", ranks=(0, 1), victims=())
DEEP = attrs.evolve(BUG, culprits=tuple(attrs.evolve(c, stack=(*TORCH, *LOOP)) for c in BUG.culprits))
SEGV = killed("rank_segfault", "SIGSEGV")
KILL = killed("rank_killed_sigkill", "SIGKILL", ("cgroup", "no process of this job was killed for memory"), stack=())
NODE = incident("crash", "network_node_unreachable", ("relay", "node n1 is gone: its launcher is silent"), stack=())
UNKNOWN = incident("crash", "unknown", ("exit", "exit code 3 and no exception on record"), stack=(), confidence=0.2)
KNOWN = {
    "hang": HANG,
    "stopped": STOPPED,
    "hang ended from outside": ENDED_HANG,
    "preemption of a hang": LEFT,
    "preemption": PREEMPTED,
    "hindered preemption": HINDERED,
    "slow": SLOW,
    "nan": NAN,
    "oom": OOM,
    "bug": BUG,
    "deep bug": DEEP,
    "segfault": SEGV,
    "kill": KILL,
    "node": NODE,
    "unknown": UNKNOWN,
}
RESUME = "resilience run --run-dir /runs/a train.py"
ENDINGS = {
    "unknown": JobEnding(),
    "running": JobEnding(running=True),
    "finished": JobEnding(verdict="finished", exit_code=0, reason="all ranks exited with 0", ended_at=1.8e9 + 60),
    "stopped": JobEnding(
        verdict="stop",
        exit_code=77,
        reason="the same error ended two attempts in a row, so another one would end alike",
        resume=RESUME,
        ended_at=1.8e9 + 60,
    ),
    "asked": JobEnding(
        verdict="give_up",
        exit_code=1,
        reason=f"{STOOD}; then the job was asked to leave by {ASKED}; no stop was agreed",
        resume=RESUME,
        ended_at=1.8e9 + 60,
    ),
}


def numbered(*incidents):
    """As a run directory has them: one after the other."""
    return [
        attrs.evolve(one, id=f"{number:04d}-{one.kind}", attempt=number - 1, detected_at=1.8e9 + number)
        for number, one in enumerate(incidents, 1)
    ]


def sentences(lines, ends):
    """What a page says, without the places in stacks, and the numbers and ids that headlines begin with."""
    said = [re.sub(r"^\d{4}-\w+  ", "", line) for line in lines if not line.startswith("    ")]
    parts = [part for line in said for part in re.split(rf"(?<=[{ends}]) |, in attempt ", line)]
    return [part.strip(" .:;").casefold() for part in parts if len(part.split()) > 2]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", KNOWN)
def test_no_sentence_of_the_page_occurs_twice(name, ending):
    """Of one incident, however its job ended; nor is a sentence part of another one."""
    said = sentences(page([KNOWN[name]], ENDINGS[ending]), ".:;")
    assert len(said) == len(set(said)), said
    long = [sentence for sentence in said if len(sentence.split()) > 5]
    assert not [(a, b) for a, b in itertools.permutations(long, 2) if a in b], said


@given(st.lists(st.sampled_from(sorted(KNOWN)), max_size=5), st.sampled_from(sorted(ENDINGS)))
def test_no_sentence_of_a_page_of_several_occurs_twice(names, ending):
    """A restart that fails in the same way is one line that says so."""
    lines = page(numbered(*(KNOWN[name] for name in names)), ENDINGS[ending])
    # Two jobs may be asked to leave by the same: headlines are compared as a whole.
    titles = [line.partition("  ")[2] for line in lines if re.match(r"\d{4}-\w+  (?!The same as )", line)]
    said = sentences([line for line in lines if not re.match(r"\d{4}-", line)], ".")
    for told in (titles, said):
        assert len(told) == len(set(told)), told


TEXTS = st.text(st.sampled_from("ab1 .;:'`\n\x1b/"), max_size=40)
INCIDENTS = st.builds(
    Incident,
    id=st.none() | st.just("0007-hang"),
    kind=st.none() | st.sampled_from(KINDS) | TEXTS,
    attempt=st.none() | st.integers(0, 3),
    detected_at=st.none() | st.floats(0, 1e18),
    culprits=st.lists(
        st.builds(Culprit, st.integers(0, 9), TEXTS, st.none() | st.integers(0, 9), TEXTS, st.lists(TEXTS)), max_size=6
    ).map(tuple),
    victims=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    category=st.none() | TEXTS,
    cause=st.none() | st.sampled_from(sorted(causes())) | TEXTS,
    action=st.none() | st.sampled_from(ACTIONS) | TEXTS,
    confidence=st.none() | st.floats(0, 1),
    evidence=st.lists(
        st.builds(
            Evidence, st.sampled_from(["exception", "stall", "cure", "notice", "order", "exit", "proc", "x"]), TEXTS
        ),
        max_size=5,
    ).map(tuple),
    recovered_at=st.none() | st.floats(0, 1e18),
    recovery_s=st.none() | st.floats(0, 1e9),
    lost_steps=st.none() | st.integers(0, 9),
)


@given(st.lists(INCIDENTS, max_size=3), st.sampled_from(sorted(ENDINGS)), st.none() | st.integers(1, 200))
def test_whatever_a_report_holds_is_told_in_lines(incidents, ending, width):
    """A torn report, or one of another version, is told as far as it goes; its text makes no line of its own."""
    lines = page(incidents, ENDINGS[ending], width=width)
    assert not any(set("\n\r\x1b") & set(line) for line in lines)


def test_the_program_is_shown_though_there_are_30_library_frames():
    """And two ranks with one stack share it."""
    lines = page([DEEP], JobEnding())
    at = lines.index("  ranks 0-1")
    assert lines[at + 1 : at + 4] == [f"    {frame}" for frame in LOOP]
    assert lines[at + 4] == "    in torch/nn/modules/module.py:0 _call_impl (and 29 more frames of libraries)"
    assert sum("train_step" in line for line in lines) == 1


def test_ranks_elsewhere_have_their_own_place():
    """The headline tells where the first one was; who was somewhere else is told beside the stack."""
    culprits = (Culprit(0, "n0", 40, "fwd", LOOP[:1]), Culprit(9, "n1", 41, "bwd", LOOP[1:]))
    lines = page([attrs.evolve(HANG, culprits=culprits)], JobEnding())
    assert "  rank 0" in lines
    assert "  rank 9 on n1 at step 41 in section bwd" in lines


def test_a_long_exception_is_told_whole_below_the_headline():
    """Cut in a headline and quoted below, it would be there one and a half times."""
    lines = page([OOM], JobEnding())
    assert "OutOfMemoryError" not in lines[0]
    assert lines[1].startswith("  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB.")


def test_the_same_again_is_one_line():
    """A program that was restarted and failed alike; only when, and what became of it, is new."""
    bug, again = numbered(BUG, BUG)
    lines = page([attrs.evolve(bug, recovered_at=2e9, recovery_s=0.8), again], ENDINGS["stopped"])
    (line,) = [line for line in lines if line.startswith("0002-crash")]
    assert line.startswith("0002-crash  The same as 0001-crash, in attempt 1 at ")
    assert sum("RuntimeError" in line for line in lines) == 1


def test_a_stall_that_somebody_ended_is_told_once():
    """The hang has it; the preemption that ended it refers to that, and the end of the job to neither."""
    said = "\n".join(page([ENDED_HANG, LEFT], ENDINGS["asked"]))
    assert said.count("made no progress") == 1
    assert said.count("0001-hang") == 2
    assert "That was while 0001-hang lasted." in said
    assert said.count(ASKED) == 1
    assert "exit code 1: no stop was agreed." in said


def test_victims_are_named_unless_the_evidence_does():
    """Rank 1 is not named by what is said of rank 12."""
    for waiting, said in (("rank 0 waits", False), ("rank 02 waits", True)):
        hang = attrs.evolve(HANG, evidence=(Evidence("flight", f"rank 1 has entered 45 collectives; {waiting}"),))
        assert any("Rank 0 waited for it." in line for line in page([hang], JobEnding())) == said


def test_what_to_do_comes_last_with_a_command_to_copy():
    """The command is a line of its own, as long as it is."""
    lines = page([BUG], attrs.evolve(ENDINGS["stopped"], resume=f"{RESUME} {'x' * 500}"), width=80)
    assert lines[-2:] == ["What to do: fix the program, then run it again:", f"  {RESUME} {'x' * 500}"]
    assert page([BUG], JobEnding())[-1].startswith("What to do: Repair the program" if BUG.action == "stop" else "What")
    assert page([SLOW], ENDINGS["finished"])[-1].startswith("The job finished at ")


def test_the_end_of_the_job_stands_below_its_newest_incident_only():
    """Who asks for an earlier one by its number is not told how the job ended much later."""
    bug, _ = numbered(BUG, SEGV)
    assert not any("77" in line for line in page([bug], ENDINGS["stopped"], newest="0002-crash"))


def test_paragraphs_are_wrapped_and_places_are_not():
    """To the terminal's width; what may be copied or clicked stays whole."""
    lines = page([DEEP], ENDINGS["stopped"], width=60)
    assert f"    {LOOP[0]}" in lines
    assert all(len(line) <= 60 for line in lines if not line.startswith("    ") and RESUME not in line)


@pytest.mark.parametrize(
    ("facts", "ending", "said"),
    [
        ({}, "running", "the run has not gone on yet"),
        ({}, "stopped", "the job ended before it recovered"),
        ({}, "finished", "the job finished all the same"),
        ({}, "unknown", "no job runs here now, and none told that it went on"),
        ({}, None, ""),
        ({"action": "stop"}, "stopped", ""),
        ({"lost_steps": 3}, "running", "the run has not gone on yet, 3 steps to be repeated"),
        ({"lost_steps": 1, "action": "stop"}, "stopped", "1 step to be repeated"),
        ({"recovered_at": 2.0, "recovery_s": 0.4}, "stopped", "the run went on 0.4 s later"),
        ({"recovered_at": 2.0}, "stopped", "the run went on"),
        (
            {"recovered_at": 2.0, "recovery_s": 6.0, "detection_latency_s": 15.0, "action": "none"},
            "stopped",
            "it went on by itself after 21 s",
        ),
    ],
)
def test_a_recovery_is_told_as_it_was(facts, ending, said):
    """Of a job that has ended, `not yet` is untrue; where nobody knows, nothing is claimed."""
    hang = attrs.evolve(HANG, action="restart")
    assert recovery_words(attrs.evolve(hang, **facts), None if ending is None else ENDINGS[ending]) == said


def test_the_headline_ends_with_the_users_own_line():
    """Not with a library's; and once, where the words of an exception have it already."""
    hung = incident("hang", "hang_rank_stuck", stack=(*TORCH, *LOOP))
    assert page([hung], JobEnding())[0].endswith("hang_rank_stuck (hang), at train.py:15.")
    raised = crash("user_code_error", "ValueError: seen at train.py:15")
    assert page([raised], JobEnding())[0].count("train.py:15") == 1
    assert page([incident("hang", "hang_rank_stuck", stack=TORCH)], JobEnding())[0].endswith("hang_rank_stuck (hang).")
