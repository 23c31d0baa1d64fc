"""The scenarios of the tests of NVIDIA's extension, each with the tests that hold it here, or the reason why none does.

They are numbered in the order of its folders of tests.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

TESTS = Path(__file__).parent.parent


@attrs.frozen
class Scenario:
    """What happens there, and what holds it here: tests as `file::name`, below `tests/`, or a reason."""

    what: str
    tests: tuple[str, ...] = ()
    reason: str = ""


def of(what: str, *tests: str, reason: str = "") -> Scenario:
    return Scenario(what, tests, reason)


_NVRX, _DEATHS, _HANGS = (
    "integration/test_nvrx.py",
    "integration/test_faults_deaths.py",
    "integration/test_faults_hangs.py",
)
_TIMEOUTS, _CLIENT = "unit/adapters/test_nvrx_timeouts.py", "unit/adapters/test_nvrx_client.py"
_DETECTOR, _SCORES = "unit/adapters/test_nvrx_detector.py", "unit/straggler/test_scores.py"
_OPTIONS, _POLICY = "unit/launcher/test_options.py", "unit/launcher/test_restart_policy.py"
_DROP_IN, _LIGHTNING = "integration/test_lightning_drop_in.py", "integration/test_lightning.py"
_RECOVERY = "integration/test_launcher_recovery.py"
_IN_PROCESS = "ranks start again in new processes, in a fraction of a second; there is no restart within one"

SCENARIOS = {
    1: of("ranks end before any heartbeat", f"{_NVRX}::test_an_end_is_no_hang"),
    2: of("one rank sends no first heartbeat", f"{_HANGS}::test_a_hang_before_the_first_beat"),
    3: of("no rank sends one", f"{_NVRX}::test_a_rank_that_never_beats_is_ended"),
    4: of("SIGTERM to all ranks", f"{_DEATHS}::test_sigterm_to_every_process_ends_the_job_within_the_grace"),
    5: of(
        "SIGTERM to rank 0",
        "integration/test_preemption_ignored.py::test_a_signal_acts_when_no_check_answers_it_within_the_grace",
    ),
    6: of("SIGKILL to rank 0", f"{_DEATHS}::test_the_rank_that_went_first_is_named"),
    7: of("SIGKILL to two ranks", f"{_DEATHS}::test_twenty_kills_in_a_row_are_recovered_from_one_by_one"),
    8: of("SIGKILL to all", f"{_DEATHS}::test_all_ranks_killed"),
    9: of("a long sleep after the shutdown", f"{_NVRX}::test_an_end_is_no_hang"),
    10: of(
        "ranks die and come again, four times", f"{_DEATHS}::test_twenty_kills_in_a_row_are_recovered_from_one_by_one"
    ),
    11: of(
        "a death while the others are in a section",
        f"{_NVRX}::test_a_hang_is_ended_by_the_timeout_of_where_it_is",
        "unit/hang/test_detect.py::test_survivors_behind_a_dead_rank",
    ),
    12: of(
        "what goes wrong there: nested, outside, close-all, unknown names, a dead monitor, threads, forks",
        f"{_HANGS}::test_an_expired_outer_section_counts_while_inner_ones_come_and_go",
        f"{_NVRX}::test_a_hang_is_ended_by_the_timeout_of_where_it_is",
        f"{_CLIENT}::test_end_all_sections_closes_each",
        f"{_CLIENT}::test_what_nobody_has_set_is_learned",
        "integration/test_faults_watching.py::test_a_monitor_that_is_killed_or_frozen_is_replaced",
        "integration/test_preemption.py::test_a_signal_to_the_whole_tree_stops_the_job_at_one_step",
        f"{_CLIENT}::test_two_threads_and_a_forked_child_hurt_nothing",
        f"{_DEATHS}::test_a_data_loader_worker_that_does_not_end",
    ),
    13: of("timeouts of heartbeats", f"{_TIMEOUTS}::test_heartbeats_give_the_longest_times_the_factor"),
    14: of(
        "timeouts of sections",
        f"{_TIMEOUTS}::test_sections_nest_and_the_time_between_is_measured",
        f"{_TIMEOUTS}::test_wrong_use_of_sections_is_named",
    ),
    15: of("a selection of them, merged", f"{_TIMEOUTS}::test_what_is_not_selected_stays"),
    16: of("all sections closed at once", f"{_TIMEOUTS}::test_sections_may_overlap_and_each_has_its_own_start"),
    17: of(
        "the longest of all ranks; without a group those of one",
        f"{_TIMEOUTS}::test_the_longest_of_all_ranks_counts_on_each",
        f"{_CLIENT}::test_without_a_page_everything_works_and_nothing_is_watched",
    ),
    18: of(
        "calculated, saved, loaded by the next job",
        f"{_CLIENT}::test_calculated_timeouts_are_kept_and_win",
        f"{_NVRX}::test_a_hang_between_heartbeats_is_ended_and_timeouts_are_kept_over_jobs",
    ),
    19: of(
        "exit codes of the launcher",
        f"{_NVRX}::test_under_its_own_launcher",
        "integration/test_launcher_endings.py::test_a_spent_budget_is_1_and_the_exit_code_is_on_record",
    ),
    20: of(
        "a simulated preemption",
        f"{_RECOVERY}::test_ranks_that_save_on_sigterm_get_the_time_to_do_so",
        f"{_RECOVERY}::test_sigterm_ends_everything_and_is_no_crash",
    ),
    21: of(
        "a hang, an exception, a good end",
        "integration/test_failures_live.py::test_the_job_gets_over_everything",
        f"{_HANGS}::test_every_hang_is_one_incident_and_the_job_recovers_from_each",
    ),
    22: of(
        "options over the file; bad values are errors",
        f"{_OPTIONS}::test_the_ranks_are_told_what_nvidias_extension_is_configured_with",
        "unit/core/settings/test_nvrx.py::test_mistakes_are_errors",
        "unit/core/settings/test_nvrx.py::test_a_file_without_the_section",
    ),
    23: of(
        "cycles without progress end the job",
        f"{_POLICY}::test_three_attempts_without_a_first_step_stop_the_job",
        f"{_POLICY}::test_a_new_checkpoint_gives_the_budget_back",
    ),
    24: of(
        "spare nodes; requests of ranks",
        "integration/test_node_left_out.py::test_the_others_go_on_without_the_node_whose_hardware_is_broken",
        "integration/test_separate_nodes.py::test_a_killed_node_is_waited_for_where_it_is_needed",
        f"{_NVRX}::test_a_request_counts_when_the_attempt_fails",
        f"{_OPTIONS}::test_that_no_node_is_a_spare_is_said",
        reason="no node waits as a spare, so a world without one of its nodes is smaller; its launcher says so",
    ),
    25: of(
        "ranks n times as slow",
        f"{_DETECTOR}::test_ranks_are_compared_with_the_fastest",
        f"{_SCORES}::test_a_gpu_that_takes_n_times_as_long_in_all_kernels_has_a_score_of_one_over_n",
    ),
    26: of(
        "kernels of one rank alone",
        f"{_DETECTOR}::test_what_one_rank_lacks_leaves_the_others_their_scores",
        f"{_SCORES}::test_a_kernel_of_one_rank_alone_does_not_count",
    ),
    27: of("individual scores", f"{_SCORES}::test_the_individual_score_of_kernels_in_the_published_case"),
    28: of(
        "sections with noise: exactly the slow one",
        f"{_NVRX}::test_the_straggler_is_named_on_rank_0",
        "integration/test_stragglers.py::test_each_rank_is_slow_in_another_thing",
    ),
    29: of("one rank alone", f"{_DETECTOR}::test_one_rank_alone_is_as_fast_as_the_fastest"),
    30: of("every second pass is timed", f"{_DETECTOR}::test_of_so_many_passes_one_is_timed"),
    31: of("wrapped callables", f"{_DETECTOR}::test_callables_are_wrapped_and_given_back"),
    32: of("the interval of reports", f"{_DETECTOR}::test_the_time_between_reports_is_counted_in_iterations"),
    33: of(
        "how many collectives a report takes",
        f"{_NVRX}::test_the_straggler_is_named_on_rank_0",
        reason="one per report, since medians travel with their names; none where each rank has its own scores",
    ),
    34: of("two reports in a row", f"{_DETECTOR}::test_sections_are_timed_and_forgotten_after_a_report"),
    35: of(
        "locked clocks of a GPU",
        "integration/test_stragglers_gpu.py::test_a_slow_backward_on_a_shared_device_is_named_within_20_steps",
        reason="setting clocks takes rights that tests do not have; another program on the device slows it",
    ),
    36: of(
        "which fits are finished",
        "unit/adapters/test_lightning.py::test_a_fit_is_complete_unless_its_time_was_up_or_it_was_only_begun",
        f"{_DROP_IN}::test_reports_preemption_and_the_finished_flag",
    ),
    37: of(
        "validate and test outside of a fit",
        f"{_LIGHTNING}::test_a_trial_an_evaluation_a_thread_a_second_fit_and_a_prompt_raise_no_incident",
    ),
    38: of(
        "timeouts are saved at which ends",
        "unit/hang/test_timeouts.py::test_reused_by_the_same_script_and_world_size",
        reason="the monitor keeps them each minute and at the end of whatever kind, not only at a graceful one",
    ),
    39: of(
        "what an exception asks the launcher for",
        f"{_NVRX}::test_a_request_counts_when_the_attempt_fails",
        "integration/test_lightning_sections.py::test_the_policy_for_exceptions_is_obeyed",
    ),
    40: of(
        "scores printed, logged, and a stop",
        f"{_DROP_IN}::test_the_recipe_stops_at_its_threshold_and_at_nothing_else",
        f"{_DROP_IN}::test_a_rehearsed_fault_scores_for_the_loggers_and_another_signal",
    ),
    41: of(
        "pings, soft and hard timeouts in the process",
        "integration/test_hang_named.py::test_the_job_goes_on_after_each",
        reason=_IN_PROCESS,
    ),
    42: of(
        "which exceptions restart in the process",
        f"{_POLICY}::test_the_same_user_error_twice_in_a_row_stops_the_job",
        reason=_IN_PROCESS,
    ),
    43: of(
        "an asynchronous save equals a synchronous one",
        "unit/checkpoint/test_save_in_background.py::test_what_is_saved_is_the_state_at_the_save",
        "unit/checkpoint/test_save_in_background.py::test_other_ranks_see_the_commit_and_the_failure",
    ),
    44: of(
        "incomplete checkpoints are ignored",
        "integration/test_checkpoint_killed.py::test_a_writer_killed_anywhere_leaves_a_valid_newest",
    ),
}


def test_none_is_left_out():
    """44 of them."""
    assert sorted(SCENARIOS) == list(range(1, 45))


@pytest.mark.parametrize("number", SCENARIOS)
def test_each_has_a_test_or_a_reason(number):
    """A test that is renamed is renamed here, too."""
    scenario = SCENARIOS[number]
    assert scenario.tests or scenario.reason, scenario.what
    for test in scenario.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), test
