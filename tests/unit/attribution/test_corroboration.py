"""How a death and what its log or the kernel says about it make one verdict."""

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.exits import classification, classify_exit
from resilience_sdk.attribution.first_death import Death, find_first_death, weigh
from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.incidents.record import Evidence

statements = st.builds(
    lambda cause, confidence, symptom: classification(cause, confidence, Evidence("log", cause), symptom=symptom),
    st.sampled_from(sorted(causes())),
    st.floats(0.1, 0.9),
    st.booleans(),
)


def told(cause, confidence=0.9, *, symptom=False):
    return classification(cause, confidence, Evidence("log of rank 1", f"words of {cause}"), symptom=symptom)


def test_an_abort_is_what_the_log_says_it_was():
    """A process that aborts has met something else; its exit stays as evidence."""
    found = weigh(classify_exit(-6), [told("cuda_illegal_memory_access")])
    assert found.cause == "cuda_illegal_memory_access"
    assert [item.source for item in found.evidence] == ["log of rank 1", "exit"]


def test_a_sure_death_is_not_talked_over():
    """SIGSEGV stays SIGSEGV whatever else stands in the log, which is quoted; what explains it takes its place."""
    crash = classify_exit(-11)
    found = weigh(crash, [told("dns_failure")])
    assert (found.cause, found.confidence) == ("rank_segfault", crash.confidence)
    assert found.evidence[-1].text == "words of dns_failure"
    assert weigh(crash, [told("gpu_fell_off_bus")]).cause == "gpu_fell_off_bus"


def test_two_who_say_the_same_are_surer():
    """And the action is still the taxonomy's."""
    found = weigh(classify_exit(-9, cgroup_oom=True), [told("host_oom_kill")])
    assert found.cause == "host_oom_kill"
    assert found.confidence > 0.9


def test_a_rank_whose_log_only_misses_a_peer_is_a_victim():
    """A watchdog ends its process with an abort: the other one, which was killed later, is the culprit."""
    gave_up = Death(0, -6, None, 1, told=(told("nccl_watchdog_timeout", 0.6, symptom=True),))
    found = find_first_death([gave_up, Death(1, -9, None, 2)])
    assert (found.culprits, found.victims) == ((1,), (0,))


def test_the_node_explains_a_death_and_names_nobody_else():
    """A GPU that is gone is why rank 1 crashed; a symptom on the node says nothing."""
    deaths = [Death(0, 0, None, 1), Death(1, -11, None, 2)]
    found = find_first_death(deaths, node_told=[told("gpu_fell_off_bus")])
    assert (found.culprits, found.classification.cause) == ((1,), "gpu_fell_off_bus")
    found = find_first_death(deaths, node_told=[told("network_partition", symptom=True)])
    assert found.classification.cause == "rank_segfault"


@given(statements, st.lists(statements, max_size=4))
def test_whatever_is_said_the_verdict_holds_together(own, others):
    """It is one of the causes that were named, with its own category and action, and all of its reasons."""
    found = weigh(own, others)
    assert found.cause in {own.cause, *(other.cause for other in others)}
    entry = causes()[found.cause]
    assert (found.category, found.action) == (entry.category, entry.action)
    assert 0.0 <= found.confidence <= 0.97 or found.confidence == own.confidence
    assert set(own.evidence) <= set(found.evidence)


@given(statements, st.lists(statements, max_size=4))
def test_a_symptom_is_only_left_for_what_explains_it(own, others):
    """A victim never becomes a culprit because its log holds another guess."""
    own = classification(own.cause, own.confidence, symptom=True)
    found = weigh(own, others)
    if not found.symptom:
        assert any(own.cause in causes()[other.cause].explains for other in others if not other.symptom)
        assert any(other.cause == found.cause and not other.symptom for other in others)
