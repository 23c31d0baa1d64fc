"""A program that closes descriptors which are not its own."""

from harness import job


def test_what_the_program_closes_is_opened_again_and_its_own_files_are_left_alone(tmp_path):
    """No traceback, one line; what it opens next keeps its content, and a stop is agreed on as ever."""
    with job(tmp_path, "--start-method", "exec", "closing.py", str(tmp_path)) as run:
        assert run.finish() == 75, run.screen
        assert "Traceback" not in run.screen, run.screen
        assert run.screen.count("has closed descriptors of the SDK") == 1
        assert run.out == "{b'mine'}\n", run.screen
        (degraded,) = run.events("degraded")
        assert degraded["what"] == "descriptors"
        assert run.events("stop_agreed", rank=0)
