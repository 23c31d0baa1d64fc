"""The glance at a line passes over what means nothing, and nothing else."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.attribution import diagnose
from resilience_sdk.attribution.exceptions import exception_rules
from resilience_sdk.attribution.log_lines import parse_line
from resilience_sdk.attribution.log_reader import ExitReports
from resilience_sdk.attribution.log_scan import may_mean
from resilience_sdk.attribution.log_signs import signs
from resilience_sdk.attribution.tracebacks import parse_exception_line


@pytest.mark.parametrize("prefix", [b"", b"2026-01-01 10:00:00,123 ERROR ", b"[rank3]: ", b"3: "])
def test_no_sign_is_passed_over(prefix):
    """Every example of every sign is read, whatever stands before it; so is every exception that a rule knows."""
    for sign in signs():
        assert may_mean(prefix + sign.example.encode()), sign.example
    for rule in exception_rules():
        line = f"{rule.example['type']}: {rule.example['message']}".splitlines()[0]
        if parse_exception_line(line) is not None:
            assert may_mean(prefix + line.encode()), line


@settings(max_examples=200, deadline=None)
@given(
    st.text("ERRORError exitcodefailed()-:19 srun", max_size=80),
    st.sampled_from(
        [
            "failed (exitcode: -9) local_rank: 0 (pid: 7)",
            "Unable to shutdown process 7 via",
            "srun: error: n1: task 3: Exited with exit code 1",
            "",
        ]
    ),
)
def test_what_the_reader_takes_by_its_form_is_not_passed_over(before, report):
    """Exceptions and launchers' reports: whatever is one of them is read."""
    text = f"{before}{report}"
    line = parse_line(1, text.encode())
    if parse_exception_line(line.text) is not None or ExitReports().read(line):
        assert may_mean(text.encode())


def _errors_without_meaning(lines):
    dice = random.Random(5)
    words = ["".join(dice.choices("bghjkmpqvwxyz", k=dice.randint(3, 9))) for _ in range(1000)]
    return ["ERROR " + " ".join(dice.choices(words, k=11)) + " failed" for _ in range(lines)]


def test_a_fault_among_thousands_of_errors_that_mean_nothing_is_found():
    """The line, its number and the end of the rank, long after the glance has come into play."""
    lines = _errors_without_meaning(6000)
    lines[5000:5000] = ["RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"]
    found = diagnose("\n".join(lines) + "\n")
    assert (found.category, found.evidence[0].line) == ("cuda", 5001)


def test_a_log_of_errors_takes_time_in_proportion_to_its_length():
    """Twice the lines, no line like another, take about twice the time of the processor; never four times."""

    def seconds(lines):
        text = "\n".join(_errors_without_meaning(lines)) + "\n"
        start = time.process_time()
        diagnose(text)
        return time.process_time() - start

    seconds(100)
    assert min(seconds(8000), seconds(8000)) < 4 * max(seconds(4000), seconds(4000))
