"""What a program says starts a look at its node, and takes none out: that needs what was measured, or asked."""

import attrs
import pytest

from resilience_sdk.attribution.exits import classification
from resilience_sdk.incidents import Evidence
from resilience_sdk.launcher.restart_policy import decide
from resilience_sdk.postmortem import crash
from resilience_sdk.postmortem.collect import LogFindings
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.facts import AttemptFacts, EndedBy, EndingRequest, NodeLook, RankExit, RankTrace
from resilience_sdk.system import hostinfo

ECC = {"type": "RuntimeError", "message": "CUDA error: uncorrectable ECC error encountered", "frames": []}
BROKEN = classification("gpu_ecc_uncorrectable", 0.9, Evidence("look", "GPU 0: ecc 2"), measured=True)


class Told:
    """A journal of these events."""

    def __init__(self, *events):
        self._events = events

    def events(self):
        """All of them."""
        return self._events


def facts(exception=ECC, code=1, **more):
    """One rank that ended so, while its peer was ended by the launcher."""
    exits = (
        RankExit(0, 0, 100, code, 0, 1_000, ended_by_us=False),
        RankExit(1, 1, 101, -15, 1, 9_000, ended_by_us=True),
    )
    traces = {end.rank: RankTrace(end.rank, end.pid, None, None, None, None) for end in exits}
    traces[0] = attrs.evolve(traces[0], exception=exception)
    return AttemptFacts(0, "n0", exits, traces, EndedBy.RANKS, ending_ns=5_000, **more)


def verdict(facts):
    """What is concluded, and decided."""
    first = crash.first_death(facts)
    return first.classification, decide([crash.attempt_end(facts, first)], 3).verdict


def in_log(cause):
    """A finding in what all ranks have printed."""
    return LogFindings(classification(cause, 0.9, Evidence("the launcher's standard error", "GPU node-4 ...")))


@pytest.mark.parametrize(
    "said",
    [
        facts(),
        facts(None, -6, job_told=in_log("gpu_hardware_faulty")),
        facts(None, -6, told={0: (in_log("gpu_hang").known,)}),
    ],
    ids=["exception", "standard-error", "own-log"],
)
def test_words_alone_start_the_ranks_again(said):
    """They stay the cause, less sure, and say that nothing confirms them."""
    assert crash.blames_by_words(said)
    known, decided = verdict(said)
    assert (known.category, known.action, decided) == ("hardware", "restart", JobVerdict.RESTART)
    assert known.confidence <= 0.5
    looked = attrs.evolve(said, look=NodeLook((), "NVML: GPU 0 in order"))
    assert "NVML: GPU 0 in order" in verdict(looked)[0].evidence[-1].text
    assert verdict(looked)[1] is JobVerdict.RESTART


def test_what_a_look_finds_takes_the_node_out():
    """What was measured comes first, what was said stays beside it."""
    known, decided = verdict(facts(look=NodeLook((BROKEN,), "NVML: ...")))
    assert (known.cause, known.action, decided) == ("gpu_ecc_uncorrectable", "exclude_node", JobVerdict.HARDWARE)
    assert known.evidence[0].source == "look"
    assert any("uncorrectable ECC" in one.text for one in known.evidence)
    vague = attrs.evolve(BROKEN, cause="gpu_hardware_faulty")
    assert verdict(facts(look=NodeLook((vague,), "NVML: ...")))[0].cause == "gpu_ecc_uncorrectable"
    other = attrs.evolve(BROKEN, cause="gpu_fell_off_bus")
    assert verdict(facts(look=NodeLook((other,), "NVML: ...")))[0].cause == "gpu_fell_off_bus"
    assert verdict(facts(look=NodeLook((other, vague), "NVML: ...")))[0].cause == "gpu_ecc_uncorrectable"


def test_the_kernel_and_the_watch_need_no_other_look():
    """The kernel's words are measured; so is what the watch has seen on this node while the job ran."""
    kernel = classification("gpu_ecc_uncorrectable", 0.9, Evidence("kernel", "NVRM: Xid ...: 48"), measured=True)
    assert not crash.blames_by_words(facts(node_told=(kernel,)))
    assert verdict(facts(node_told=(kernel,)))[1] is JobVerdict.HARDWARE
    seen = {
        "event": "health",
        "t": 1.0,
        "host": hostinfo.host_name(),
        "cause": "gpu_ecc_uncorrectable",
        "what": "GPU 0",
    }
    failed = facts(journal=Told({**seen, "status": "failed", "why": "2 errors"}))
    assert not crash.blames_by_words(failed)
    assert verdict(failed)[1] is JobVerdict.HARDWARE
    late = {"status": "failed", "why": "GetName has not returned within 5.6 s"}
    for other in (
        late,
        {"status": "degraded"},
        {"status": "failed", "host": "elsewhere"},
        {"status": "failed", "cause": "x"},
    ):
        assert verdict(facts(journal=Told({**seen, **other})))[1] is JobVerdict.RESTART


def test_a_rank_that_asks_for_it_is_heard():
    """By the API, which is no printed line."""
    asked = facts()
    request = EndingRequest("exclude_node", "its GPU computes wrong numbers")
    asked.traces[0] = attrs.evolve(asked.traces[0], request=request)
    assert not crash.blames_by_words(asked)
    known, decided = verdict(asked)
    assert (known.action, decided) == ("exclude_node", JobVerdict.HARDWARE)


def test_other_words_start_no_look():
    """A bug of the program's, a full disk."""
    for message in ("division by zero", "[Errno 28] No space left on device: '/a'"):
        assert not crash.blames_by_words(facts({**ECC, "message": message}))
