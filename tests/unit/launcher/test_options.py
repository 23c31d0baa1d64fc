"""The command line of `resilience run`."""

import os
import shlex

import pytest
from torch.distributed import run
from torch.distributed.run import get_args_parser

from resilience_sdk.core.settings import nvrx
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.options import _spelt_out, known_options, launch_config, parse_options, resume_command

NVIDIAS = {spelling for name in (*nvrx.KEYS, *nvrx.OPTIONS) for spelling in nvrx.spellings(name)}


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


def test_one_node_takes_a_free_port_with_older_torch_too(script, monkeypatch):
    """Whose parser has a port of its own before anybody asks for one; a variable asks."""
    newer = run.get_args_parser

    def older():
        parser = newer()
        parser.set_defaults(master_port=os.environ.get("PET_MASTER_PORT", 29500))
        return parser

    monkeypatch.setattr(run, "get_args_parser", older)
    assert parse(script).local
    assert not parse("--master-port", "29500", script).local
    monkeypatch.setenv("PET_MASTER_PORT", "29500")
    assert not parse(script).local


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


def test_options_in_short_are_what_torchrun_takes_them_for(script, capsys):
    """Each prefix of each of its options; one that it calls ambiguous, or does not know, is refused."""
    parser = get_args_parser()
    for action in parser._actions:
        for name in action.option_strings:
            if not name.startswith("--") or action.dest == "help":
                continue
            value = [] if action.nargs == 0 else ["1" if action.choices is None else next(iter(action.choices))]
            for short in {name[:end] for end in range(3, len(name))} - known_options().keys():
                try:
                    theirs = getattr(parser.parse_args([short, *value, script, "--own", "2"]), action.dest)
                except SystemExit:
                    named = [one.dest for one in parser._actions for o in one.option_strings if o.startswith(short)]
                    if len(set(named)) == 1:  # two spellings of one option, which only newer Pythons allow
                        continue
                    with pytest.raises(ConfigError, match="unknown option"):
                        parse(short, *value, script)
                    continue
                words = _spelt_out([short, *value, script, "--own", "2"], known_options())
                assert getattr(parser.parse_args(words), action.dest) == theirs, short
                assert words[-3:] == (script, "--own", "2")
    capsys.readouterr()
    assert parse("--max_restart=1", "--nproc_per", "2", script).settings.max_restarts == 1


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
    """In full, as it is copied elsewhere; what else was given stays, except that nothing starts over again."""
    for given in (["--run-dir", "a b"], ["--run-dir=a b"], ["--run_dir", "a b"]):
        named = shlex.split(resume_command(parse("--fresh", *given, script, "--run-dir", "1"), "/r/a b"))
        assert named == ["resilience", "run", "--run-dir", "/r/a b", script, "--run-dir", "1"]
    unnamed = shlex.split(resume_command(parse(script), "/r/x"))
    assert unnamed == ["resilience", "run", "--run-dir", "/r/x", script]


def test_the_resume_command_keeps_what_is_the_scripts(script, monkeypatch, tmp_path):
    """Its own --fresh stays; a directory that the environment or a file named is written out; secrets are not."""
    own = shlex.split(resume_command(parse("--fresh", script, "--fresh", "--hf-token=hf_SECRET"), "/r/x"))
    assert own == ["resilience", "run", "--run-dir", "/r/x", script, "--fresh", "--hf-token=[redacted]"]
    config = tmp_path / "c.toml"
    config.write_text('run_dir = "/r/y"\n')
    by_file = shlex.split(resume_command(parse("--config", config, script), "/r/y"))
    assert by_file == ["resilience", "run", "--run-dir", "/r/y", "--config", str(config), script]
    monkeypatch.setenv("RESILIENCE_RUN_DIR", "/r/z")
    assert shlex.split(resume_command(parse(script), "/r/z"))[2:] == ["--run-dir", "/r/z", script]


def test_torchruns_variables_count_least(script, monkeypatch, tmp_path):
    """Argument, RESILIENCE_ variable and configuration file all win over a PET_ variable."""
    config = tmp_path / "c.toml"
    config.write_text("max_restarts = 5\n")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert parse("--config", config, script).settings.max_restarts == 5
    monkeypatch.setenv("RESILIENCE_MAX_RESTARTS", "6")
    assert parse(script).settings.max_restarts == 6
    assert parse("--max-restarts", "1", script).settings.max_restarts == 1
    monkeypatch.delenv("RESILIENCE_MAX_RESTARTS")
    assert parse(script).settings.max_restarts == 7


def test_an_unknown_rendezvous_is_refused(script):
    """Before anything exists, with the nearest name that torch knows."""
    with pytest.raises(ConfigError, match=r"'c10'.*did you mean c10d"):
        parse("--rdzv-backend", "c10", script)


def test_one_node_is_told_from_several(script):
    """Nodes that may still come count."""
    assert parse(script).one_node
    assert parse("--rdzv-backend=c10d", "--rdzv-endpoint=h:1", script).one_node
    assert not parse("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", script).one_node


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_fits_two_screens_and_help_all_has_all(word, script, monkeypatch, capsys):
    """Two screens of 48 lines and 80 columns; everything that the full help has is an option that is known."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        parse(word)
    short = capsys.readouterr()
    assert (left.value.code, short.err) == (0, "")
    assert len(short.out.splitlines()) <= 96
    assert max(map(len, short.out.splitlines())) <= 80
    for words in ("script.py", "--nproc-per-node", "--max-restarts N", "Default: 3.", "--run-dir DIR", "--help-all"):
        assert words in short.out
    assert "--dump-grace" not in short.out
    with pytest.raises(SystemExit) as left:
        parse("--help-all")
    assert left.value.code == 0
    said = capsys.readouterr().out
    for name in known_options():
        assert name in said or name.startswith("--no-") or name in NVIDIAS, name


def test_help_behind_the_script_is_the_scripts(script):
    """As torchrun has it."""
    assert parse(script, "--help").script.args == ("--help",)


def test_every_option_of_nvidias_launcher_is_taken(script, tmp_path, capsys):
    """In each of its spellings: it becomes a setting, or it is said why not; none is unknown."""
    values = {"rank_section_timeouts": "a:10", "ft_restart_policy": "any-failed", "segment": "4"}
    for name in (*nvrx.KEYS, *nvrx.OPTIONS):
        for spelling in nvrx.spellings(name):
            value = values.get(name, str(tmp_path / "log") if name == nvrx.PER_CYCLE_LOGS else "10")
            given = [spelling] if name in nvrx.SWITCHES else [spelling, value]
            settings = parse(*given, script).settings
            field = {**nvrx.TRANSLATED, **nvrx.OPTIONS_TRANSLATED}.get(name)
            if field is not None:
                assert getattr(settings, field) in (10, {"a": 10}), spelling


def test_a_file_of_nvidias_is_named_in_each_spelling(script, tmp_path):
    """With what it holds of keys that are settings here."""
    config = tmp_path / "ft.yaml"
    config.write_text("fault_tolerance: {rank_heartbeat_timeout: 7, node_health_check_interval: 8}\n")
    for spelling in nvrx.FILE_OPTIONS:
        settings = parse(spelling, config, script).settings
        assert (settings.heartbeat_timeout, settings.health_interval) == (7, 8)


def test_that_no_node_is_a_spare_is_said(script, capsys):
    """Newer versions of NVIDIA's launcher keep those above MIN waiting; a larger world may not be what a job wants."""
    for words in (("--nnodes", "4:5"), ("--provide-nvrx", "--nnodes", "4")):
        parse(*words, script)
    assert "spare" not in capsys.readouterr().err
    parse("--provide-nvrx", "--nnodes", "4:5", "--ft-segment", "1", script)
    assert "--nnodes 4:5: all nodes that come take part, none is a spare" in capsys.readouterr().err


def test_logs_of_each_cycle_become_files_of_each_rank(script, tmp_path):
    """In the directory of their prefix, unless torchrun's own options say something else."""
    prefix = tmp_path / "logs" / "job.log"
    elastic = parse("--ft-per-cycle-applog-prefix", prefix, script).elastic
    assert (elastic.log_dir, elastic.tee) == (str(tmp_path / "logs"), "3")
    elastic = parse("--ft_per_cycle_applog_prefix", prefix, "--log-dir", "x", "--tee", "1", script).elastic
    assert (elastic.log_dir, elastic.tee) == ("x", "1")


def test_what_cannot_be_had_is_refused_with_its_cure(script):
    """A policy that keeps healthy nodes, and options of a launcher that nobody here knows."""
    with pytest.raises(ConfigError, match=r"min-healthy: only any-failed.*--nnodes MIN:MAX"):
        parse("--restart-policy", "min-healthy", script)
    with pytest.raises(ConfigError, match=r"--ft-warp-drive.*docs/nvrx.md"):
        parse("--ft-warp-drive=9", script)


def test_the_ranks_are_told_what_nvidias_extension_is_configured_with(script, tmp_path):
    """Options over the file, with sections that have no timeout; only where it is provided."""
    config = tmp_path / "ft.yaml"
    config.write_text(
        "a: [{fault_tolerance: {rank_heartbeat_timeout: 7, rank_section_timeouts: {a: null}, cycle_info_dir: x}}]\n"
    )
    words = ("--ft-cfg-path", config, "--ft-rank-heartbeat-timeout", "9", "--term-timeout", "3", script)
    assert parse(*words).nvrx_section is None
    expected = {"rank_heartbeat_timeout": "9", "rank_section_timeouts": {"a": None}}
    assert parse("--provide-nvrx", *words).nvrx_section == expected
    own = tmp_path / "own.yaml"  # one more file takes nothing away, and its section counts before the other's
    own.write_text("on_hang: report\nx: {fault_tolerance: {workload_check_interval: 2, rank_heartbeat_timeout: 8}}\n")
    expected["workload_check_interval"] = 2
    assert parse("--provide-nvrx", "--config", own, *words).nvrx_section == expected
    named = parse_options(list(map(str, ("--provide-nvrx", *words))), {"RESILIENCE_CONFIG": str(own)})
    assert named.nvrx_section == expected


def test_a_file_without_a_section_is_passed_over_where_that_is_asked_for(script, tmp_path, capsys):
    """As launchers of NeMo do, which name the configuration of any training; without the option it is an error."""
    config = tmp_path / "training.yaml"
    for text in ("model: {layers: 2}\n", ""):
        config.write_text(text)
        with pytest.raises(ConfigError, match="has no `fault_tolerance:` section"):
            parse("--provide-nvrx", "--ft-cfg-path", config, script)
        for option in nvrx.SWITCHES:
            for spelling in nvrx.spellings(option):
                options = parse("--provide-nvrx", "--fault-tol-cfg-path", config, spelling, script)
                assert options.nvrx_section == {}
    assert "training.yaml has no `fault_tolerance:` section, and is passed over" in capsys.readouterr().err
    config.write_text("fault_tolerance: {rank_heartbeat_timeout: 7}\n")
    assert parse("--ft-ignore-missing-cfg", "--ft-cfg-path", config, script).settings.heartbeat_timeout == 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes=2", "--rdzv-endpoint=h:1", "--rdzv-id=x"], ("c10d", "h:1", False)),
        (["--nnodes=2", "--master-addr=h", "--master-port=7"], ("c10d", "h:7", False)),
        (["--nnodes=2", "--master-addr=h"], ("c10d", "h:29500", False)),
        (["--rdzv-backend=c10d"], ("c10d", "localhost:0", True)),
        ([], ("c10d", "localhost:0", True)),
    ],
)
def test_nodes_meet_as_under_nvidias_launcher(script, words, expected):
    """By c10d, where torchrun would need the number of each node; one alone takes a free port."""
    options = parse("--provide-nvrx", *words, script)
    assert (options.elastic.rdzv_backend, options.elastic.rdzv_endpoint, options.local) == expected


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--nproc-per-node", "99999999"], "--nproc-per-node 99999999: this machine has no room"),
        (["--nproc-per-node", "-3"], "--nproc-per-node -3"),
        (["--nnodes", "2", "--rdzv-endpoint", "localhost:abc"], "--rdzv-endpoint 'localhost:abc'"),
        (["--nnodes", "2:1"], "--nnodes 2:1"),
        (["--nnodes", "2", "--master-addr", "node1:x"], "--master-addr 'node1:x'"),
        (["--master-port", "70000"], "--master-port 70000"),
    ],
)
def test_what_no_machine_can_do_is_refused_before_anything_grows(script, argv, why):
    """By name, with the value: torch would raise, wait or grow later on."""
    with pytest.raises(ConfigError) as refused:
        parse(*argv, script)
    assert why in str(refused.value)


def test_many_ranks_on_few_processors_are_not_refused(script):
    """128 on a laptop are slow, and somebody's test."""
    assert parse("--nproc-per-node", "128", script).elastic.nproc_per_node == "128"
