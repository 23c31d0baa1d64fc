"""`resilience doctor`: the page, its JSON and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.cli.doctor import page, settings_rows
from resilience_sdk.cli.main import main
from resilience_sdk.core.settings import Settings, load_settings
from resilience_sdk.health import Finding, HealthReport, Status, software

HOSTILE = "\x1b]0;owned\x07\x1b[2J\nok  storage: all is well"


def finding(status, **changes):
    """Return a finding of the storage probe."""
    fields = {"probe": "storage", "check": "write", "subject": "/run", "evidence": "seen", "must": True}
    return Finding(status=status, **{**fields, **changes})


def report(*findings):
    """Return what was found on a node."""
    return HealthReport(node="node-1", at=1.0, took_s=0.5, findings=findings)


def test_problems_come_first_each_with_its_cure():
    """What is in order needs one line for a probe."""
    found = report(
        finding(Status.OK, check="free_space"),
        finding(Status.OK, check="free_inodes"),
        finding(Status.UNAVAILABLE, probe="gpu", check="driver", subject="", evidence="no driver"),
        finding(Status.DEGRADED, check="metadata", cure="a faster one"),
        finding(Status.FAILED, cure="make room"),
    )
    assert page(found, Settings()) == [
        "node-1: a job should not start: 1 thing must be cured first, 1 warning (looked for 0.5 s)",
        "",
        "FAILED    storage: write /run: seen",
        "          cure: make room",
        "degraded  storage: metadata /run: seen",
        "          cure: a faster one",
        "not seen  gpu: driver: no driver",
        "ok        storage: free space, free inodes",
        "",
        f"settings: {len(settings_rows(Settings()))} of {len(settings_rows(Settings()))} at their defaults (--verbose)",
    ]


def test_only_what_must_be_good_stops_a_job():
    """A failed port of many is a warning."""
    assert report(finding(Status.FAILED, must=False)).ok
    assert not report(finding(Status.OK), finding(Status.FAILED)).ok
    assert page(report(finding(Status.FAILED, must=False)), Settings())[0].startswith("node-1: a job can start, 1 warn")


def test_each_setting_tells_where_it_came_from(tmp_path):
    """An option wins over the environment, and that over a file."""
    file = tmp_path / "own.toml"
    file.write_text('heartbeat_timeout = "5min"\nmax_restarts = 7\nsafety_factor = 3.0\n')
    env = {"RESILIENCE_MAX_RESTARTS": "8", "RESILIENCE_SAFETY_FACTOR": "4"}
    settings = load_settings(arguments={"safety_factor": "6"}, config_file=str(file), env=env, strict_env=True)
    rows = settings_rows(settings)
    assert rows["heartbeat_timeout"] == {"value": 300.0, "source": str(file)}
    assert rows["max_restarts"] == {"value": 8, "source": "RESILIENCE_MAX_RESTARTS"}
    assert rows["safety_factor"] == {"value": 6.0, "source": "argument"}
    assert rows["hang_cap"]["source"] == "default"
    lines = page(report(), settings)
    assert f"  heartbeat_timeout  300  from {file}" in lines
    assert not [line for line in lines if "hang_cap" in line]
    assert [line for line in page(report(), settings, verbose=True) if line.startswith("  hang_cap ")]


def test_a_setting_of_several_parts_is_shown_as_it_is_written():
    """Numbers and words by their names."""
    env = {"RESILIENCE_SINKS": "incident-log=/tmp/x", "RESILIENCE_SECTION_TIMEOUTS": "step:5,save:60"}
    lines = page(report(), load_settings(env=env, strict_env=True))
    assert "  sinks             incident-log=/tmp/x  from RESILIENCE_SINKS" in lines
    assert "  section_timeouts  step:5,save:60  from RESILIENCE_SECTION_TIMEOUTS" in lines


def test_secrets_stand_neither_on_the_page_nor_in_the_json():
    """Reports are written into shared directories; that a secret is set, and by whom, is told."""
    settings = Settings(
        webhook_url="https://hooks.example.org/s3cret",
        prometheus_token="s3cret",
        mlflow_uri="http://me:s3cret@mlflow:5000",
        section_timeouts={"forward_pass": 60},
        sources={"webhook_url": "RESILIENCE_WEBHOOK_URL"},
    )
    found = report(
        software.shared_settings(settings), software.variables({"NCCL_PASSPHRASE": "s3cret", "NCCL_ALGO": "Ring"})
    )
    told = json.dumps([found.to_json(), settings_rows(settings), page(found, settings, verbose=True)])
    assert "s3cret" not in told
    assert "Ring" in told
    assert "forward_pass:60" in told
    assert settings_rows(settings)["webhook_url"]["source"] == "RESILIENCE_WEBHOOK_URL"


def test_what_a_name_holds_cannot_forge_a_line():
    """Directories and kernel messages are written by others."""
    lines = page(report(finding(Status.DEGRADED, subject=HOSTILE, evidence=HOSTILE, cure=HOSTILE)), Settings())
    assert not [line for line in lines if line.startswith("ok")]
    assert not [character for line in lines for character in line if not character.isprintable()]


def test_the_documentation_knows_every_key():
    """And every probe."""
    text = (Path(__file__).parents[3] / "docs" / "health.md").read_text()
    for key in (*report().to_json(), *finding(Status.OK).to_json(), "settings"):
        assert f"`{key}`" in text, f"docs/health.md does not describe {key}"


def torch(version):
    """Return what the software probe says of a torch."""
    same = {"torch": version}
    return Finding(probe="software", check="torch", status=Status.OK, must=True, data={"same": same})


def compared(tmp_path, capsys, *reports):
    """Return the exit code, page and JSON of a comparison."""
    files = []
    for number, told in enumerate(reports):
        files.append(str(tmp_path / f"{number}.json"))
        Path(files[-1]).write_text(json.dumps({**told.to_json(), "settings": {}}))
    code = main(["doctor", "--compare", *files])
    text = capsys.readouterr().out
    assert main(["doctor", "--json", "--compare", *files]) == code
    return code, text, json.loads(capsys.readouterr().out)


def on_node(name, *findings):
    """Return a report of that node."""
    return HealthReport(node=name, at=1.0, took_s=0.5, findings=findings)


def test_nodes_that_are_equal_may_start_together(tmp_path, capsys):
    """Nobody is left out."""
    code, text, told = compared(tmp_path, capsys, on_node("a", torch("2.6.0")), on_node("b", torch("2.6.0")))
    assert (code, told["ok"], told["leave_out"], told["differences"]) == (0, True, [], [])
    assert "nothing that should be equal differs" in text


def test_the_odd_and_the_broken_are_left_out(tmp_path, capsys):
    """And no other; each is told why."""
    good = [on_node(name, torch("2.6.0")) for name in ("a", "b", "c")]
    broken = on_node("d", torch("2.6.0"), finding(Status.FAILED, cure="make room"))
    code, text, told = compared(tmp_path, capsys, *good, broken, on_node("e", torch("2.5.1")))
    assert (code, told["leave_out"]) == (1, ["d", "e"])
    assert told["nodes"]["d"] == {"ok": False, "status": "failed"}
    assert text.splitlines()[-1] == "leave out: d, e"
    assert "cure: make room" in text
    assert "2.5.1 on e" in text


def test_where_nobody_is_odd_nobody_is_left_out(tmp_path, capsys):
    """Two halves do not run together, and neither is wrong; a node may have a report of each rank."""
    code, text, told = compared(tmp_path, capsys, on_node("a", torch("2.6.0")), on_node("a", torch("2.5.1")))
    assert (code, told["leave_out"], told["ok"]) == (1, [], False)
    assert "2.6.0 on a (0.json)" in text


@pytest.mark.parametrize(
    ("text", "message"), [(None, "there is no file"), ("{}", "no report"), ("[1]", "no JSON object")]
)
def test_something_else_is_not_compared(tmp_path, capsys, text, message):
    """The file is named."""
    if text is not None:
        (tmp_path / "x").write_text(text)
    assert main(["doctor", "--compare", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rendezvous", ":29500"], "expected host:port"),
        (["--local-ranks", "0"], "expected 1 or more"),
        (["--limit", "soon"], "expected seconds"),
        (["--jsno"], "did you mean --json?"),
        (["--heartbeat-timeout", "never"], "heartbeat"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    """And exit code 2, before anything is looked at."""
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_the_doctor_imports_no_torch():
    """It would take longer than all probes; nor does the one that tells its version."""
    code = (
        "import sys, resilience_sdk.cli.doctor; from resilience_sdk.health import software; "
        "assert software.installed_torch()['__version__']; "
        "print([name for name in ('torch', 'numpy', 'pynvml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_slow_node_is_told_and_kept(tmp_path, capsys):
    """Whether to wait for it is the user's choice."""
    flops = {"a": 600e12, "b": 590e12, "c": 300e12}
    speed = {"probe": "compute", "check": "compute_speed", "subject": "cuda:0", "status": "ok"}
    nodes = [on_node(node, Finding(**speed, data={"flops": {"bfloat16": each}})) for node, each in flops.items()]
    code, text, told = compared(tmp_path, capsys, *nodes)
    assert (code, told["leave_out"]) == (0, [])
    assert [finding["subject"] for finding in told["differences"]] == ["c cuda:0"]
    assert "bfloat16 at 300000 GFLOP/s" in text


@pytest.mark.parametrize("factor", ["0", "0.5", "nan", "inf", "much", "1000"])
def test_patience_is_a_factor(factor, capsys):
    """Less than what is usual would find faults that are none, and no end would be no deadline."""
    assert main(["doctor", "--patience", factor]) == 2
    assert "--patience: expected a factor" in capsys.readouterr().err
