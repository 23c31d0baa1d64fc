"""What `resilience run` says of its command line before it loads torch."""

import os
import subprocess
import sys

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.options import look_first, parse_options
from resilience_sdk.launcher.torchruns_options import parser_in, read_parser

ANSWERED = """
import sys
from resilience_sdk.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"}))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "--nope", "x.py"), 2, "unknown option --nope"),
        (("run", "nowhere.py"), 2, "script 'nowhere.py' does not exist"),
        (("run",), 2, "no script given"),
        (("run", "--heartbeat-timeout", "soon", __file__), 2, "heartbeat_timeout"),
        (("run", "--help"), 0, "--nproc-per-node"),
        (("slurm", "--nope", "x.py"), 2, "unknown option --nope"),
        (("slurm", "--help"), 0, "--nproc-per-node"),
    ],
)
def test_a_mistake_and_the_help_need_no_torch(words, code, said):
    """It takes seconds to load, from a network file system many."""
    done = subprocess.run([sys.executable, "-c", ANSWERED, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_options_read_are_those_of_torchrun():
    """Names, destinations, whether a value follows, and help, as the installed version has them."""
    run = pytest.importorskip("torch.distributed.run")

    def told(parser):
        return {(tuple(a.option_strings), a.dest, str(a.nargs), a.help) for a in parser._actions}

    assert told(read_parser()) == told(run.get_args_parser())


MADE = "def get_args_parser():\n    parser = ArgumentParser()\n    {}\n    return parser\n"


@pytest.mark.parametrize(
    "line",
    [
        "parser.add_argument('--a', action=new_kind)",
        "parser.add_argument('--a', nargs=COUNT)",
        "parser.add_argument(NAME)",
        "parser.add_argument(*NAMES)",
        "parser.add_argument('--a'); add_more(parser)",
        "parser.add_argument('--a'); group = parser.add_argument_group('b'); group.add_argument('--b')",
        "parser.add_argument('--a'); parser.add_argument('--a')",
        "parser.add_argument(",
        "pass",
    ],
)
def test_what_is_not_plain_is_left_to_torchrun(line):
    """An option that is overlooked would be refused though torchrun knows it."""
    assert parser_in(MADE.format("parser.add_argument('--a', action=env)")) is not None
    assert parser_in(MADE.format(line)) is None
    assert parser_in("import argparse\n") is None


def test_what_the_first_look_accepts_is_still_read_by_torchrun(tmp_path, monkeypatch):
    """Variables of torchrun may say what the script is, and only torchrun reads values."""
    for name in [name for name in os.environ if name.startswith(("PET_", "RESILIENCE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PET_MODULE", "1")
    assert look_first(["package.train"]) is None
    monkeypatch.delenv("PET_MODULE")
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "many", "train.py", "--help", "--nope"]
    assert look_first(words) is None
    with pytest.raises(ConfigError, match="--nnodes 'many'"):
        parse_options(words)
