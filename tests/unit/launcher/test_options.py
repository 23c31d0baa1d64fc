"""The command line of `resilience run`."""

import os
import shlex

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.options import launch_config, parse_options, resume_command


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script to name, in an environment of its own."""
    for name in [name for name in os.environ if name.startswith(("PET_", "RESILIENCE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def parse(*argv):
    return parse_options([str(word) for word in argv])


def test_defaults_are_three_restarts_a_free_port_and_forked_ranks(script):
    """One node without a rendezvous needs none; options after the script are the script's."""
    options = parse(script, "--max-restarts", "9", "--lr", "1")
    assert options.settings.max_restarts == 3
    assert options.settings.on_hang == "restart"
    assert options.local
    assert options.start_method == "forkserver"
    assert options.script.args == ("--max-restarts", "9", "--lr", "1")
    first, second = (launch_config(parse(script), os.devnull) for _ in range(2))
    assert first.run_id != second.run_id
    assert first.max_restarts == 3


def test_torchruns_options_and_variables_hold(script, monkeypatch):
    """PET_ variables count below the command line, and a given rendezvous is used."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert parse(script).settings.max_restarts == 7
    assert parse("--max_restarts", "1", script).settings.max_restarts == 1
    given = parse("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=x", script)
    assert not given.local
    assert given.rendezvous_id == "x"
    config = launch_config(given, os.devnull)
    assert (config.min_nodes, config.nproc_per_node, config.rdzv_endpoint) == (2, 2, "h:1")
    assert not parse("--master-port", "29511", script).local
    assert parse("--standalone", "--master-port", "29511", script).local


def test_every_setting_is_an_option(script, monkeypatch):
    """Command line over environment."""
    monkeypatch.setenv("RESILIENCE_HEARTBEAT_TIMEOUT", "20")
    monkeypatch.setenv("RESILIENCE_ON_HANG", "kill")
    settings = parse("--heartbeat-timeout", "10", "--run-dir", "x", script).settings
    assert (settings.heartbeat_timeout, settings.on_hang, settings.run_dir) == (10, "kill", "x")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--max-restrats", "3", "SCRIPT"], "did you mean --max-restarts"),
        (["--max-restarts", "many", "SCRIPT"], "many"),
        (["--start-method", "thread", "SCRIPT"], "forkserver"),
        (["--nnodes", "two", "SCRIPT"], "--nnodes 'two'"),
        (["--nproc-per-node", "lots", "SCRIPT"], "--nproc-per-node lots"),
        (["--tee", "9", "SCRIPT"], "9"),
        (["SCRIPT.missing"], "does not exist"),
        (["-m", "--no-python", "SCRIPT"], "exclude one another"),
        ([], "no script given"),
    ],
)
def test_mistakes_name_the_option_and_the_value(script, argv, told):
    """Each is a ConfigError, which becomes exit code 2."""
    with pytest.raises(ConfigError, match=told):
        parse(*[word.replace("SCRIPT", script) for word in argv])


def test_start_methods_of_torchrun_are_accepted(script, capsys):
    """They concern functions there; here they mean fresh interpreters, and that is said."""
    assert parse("--start-method", "spawn", script).start_method == "exec"
    assert "spawn" in capsys.readouterr().err


def test_the_resume_command_names_the_run_directory_once(script):
    """What was given stays as it was, except that nothing starts over again."""
    named = shlex.split(resume_command(parse("--fresh", "--run-dir", "a b", script, "--lr", "1"), "/r/a b"))
    assert named == ["resilience", "run", "--run-dir", "a b", script, "--lr", "1"]
    unnamed = shlex.split(resume_command(parse(script), "/r/x"))
    assert unnamed == ["resilience", "run", "--run-dir", "/r/x", script]
