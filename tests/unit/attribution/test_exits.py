"""Exit codes, signals and exceptions get the cause that their evidence supports."""

import os
import signal
import subprocess
import sys

import pytest

from resilience_sdk.attribution.exceptions import exception_rules, match_exception
from resilience_sdk.attribution.exits import classify_exit, describe_exit
from resilience_sdk.attribution.taxonomy import causes


@pytest.mark.parametrize("rule", exception_rules(), ids=lambda rule: f"{rule.cause}-{rule.example['type']}")
def test_every_rule_is_the_one_that_reads_its_own_example(rule):
    """No rule is shadowed by an earlier one, and each names a cause of the taxonomy and its source."""
    assert match_exception(rule.example) is rule
    assert rule.cause in causes()
    assert rule.source
    found = classify_exit(1, rule.example)
    assert (found.cause, found.confidence, found.symptom) == (rule.cause, rule.confidence, rule.symptom)


@pytest.mark.parametrize(
    ("exit_code", "cause", "action"),
    [
        (0, "no_fault", "none"),
        (75, "preemption_sigterm", "requeue"),
        (-signal.SIGKILL, "rank_killed_sigkill", "restart"),
        (-signal.SIGSEGV, "rank_segfault", "restart"),
        (-signal.SIGABRT, "rank_abort", "restart"),
        (-signal.SIGBUS, "rank_bus_error", "restart"),
        (-signal.SIGTERM, "preemption_sigterm", "requeue"),
        (-signal.SIGINT, "user_interrupt", "stop"),
        (-signal.SIGUSR2, "unknown", "restart"),
        (-40, "unknown", "restart"),
        (137, "rank_killed_sigkill", "restart"),
        (139, "rank_segfault", "restart"),
        (1, "unknown", "restart"),
        (2, "user_config_error", "stop"),
        (127, "environment_error", "stop"),
        (200, "unknown", "restart"),
        (None, "unknown", "restart"),
    ],
)
def test_exit_codes_alone(exit_code, cause, action):
    """Without an exception the exit code decides, and something is always quoted as evidence."""
    found = classify_exit(exit_code, None)
    assert (found.cause, found.action) == (cause, action)
    assert found.evidence
    assert 0 < found.confidence < 1


def test_memory_evidence_decides_about_sigkill():
    """SIGKILL is the memory killer's only when the cgroup counted one; knowing it did not adds confidence."""
    unknown, no, yes = (classify_exit(-9, None, cgroup_oom=oom) for oom in (None, False, True))
    assert yes.cause == "host_oom_kill"
    assert no.cause == unknown.cause == "rank_killed_sigkill"
    assert unknown.confidence < no.confidence


def test_an_exception_outranks_the_signal_of_the_teardown():
    """A process that raised and then aborted in its destructors failed because of what it raised."""
    found = classify_exit(-6, {"type": "ValueError", "message": "bad", "user_frame": "train.py:3 main"})
    assert found.cause == "user_code_error"
    assert [e.source for e in found.evidence] == ["exception", "exit"]
    assert found.evidence[1].text == "died by SIGABRT"


def test_a_reset_connection_is_a_symptom_only_inside_the_job():
    """The same words from a tracker's HTTP client are no sign of a dead peer."""
    words = "[Errno 104] Connection reset by peer"
    peer = {"type": "RuntimeError", "message": words, "frames": ["/x/torch/distributed/c10d.py:1 all_reduce"]}
    tracker = {"type": "requests.exceptions.ConnectionError", "message": words, "frames": []}
    assert classify_exit(1, peer).symptom
    assert not classify_exit(1, tracker).symptom
    assert classify_exit(1, tracker).action == "wait"


@pytest.mark.parametrize(
    ("message", "cause"), [("2", "user_config_error"), ("", "unknown"), ("no data", "user_code_error")]
)
def test_sys_exit_is_an_exit_code_unless_it_says_something(message, cause):
    """`SystemExit(2)` on record is exit code 2; `sys.exit("no data")` is what the program complains about."""
    code = int(message) if message.isdigit() else 1
    assert classify_exit(code, {"type": "SystemExit", "message": message}).cause == cause


def test_garbage_in_the_error_file_is_no_reason_to_fail():
    """Fields of the wrong type, as a torn or foreign file has them, still give a verdict."""
    assert classify_exit(1, {"type": 3, "message": None, "frames": "no list", "x": 1}).cause == "user_code_error"


def test_a_real_process_that_kills_itself():
    """What `subprocess` reports for a death by signal is what the classification expects."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=os.sep)
    assert classify_exit(ended.returncode, None).cause == "rank_segfault"
    assert describe_exit(ended.returncode) == "died by SIGSEGV"
    assert describe_exit(137) == "died by SIGKILL (exit code 137 of a shell)"


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:52961: Connection reset by peer.",  # noqa: E501
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",  # noqa: E501
        "Wait timeout",
    ],
)
def test_what_gloo_says_when_a_peer_is_gone_is_a_symptom(message):
    """Seen with torch 2.13: a killed peer, a peer that is late, a peer that never came to the file store."""
    assert classify_exit(1, {"type": "RuntimeError", "message": message, "user_frame": "t.py:1 main"}).symptom
