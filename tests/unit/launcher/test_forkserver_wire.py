"""What the ranks run, as one value."""

import pickle

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.forkserver_wire import Order, Script


@pytest.mark.parametrize(
    ("options", "kind", "command"),
    [
        ({}, "file", ["python", "-u", "train", "--lr", "1"]),
        ({"module": True}, "module", ["python", "-u", "-m", "train", "--lr", "1"]),
        ({"no_python": True}, "binary", ["train", "--lr", "1"]),
    ],
)
def test_the_command_is_torchruns(options, kind, command):
    """Each kind becomes the command line that torchrun executes."""
    script = Script.parse("train", ["--lr", 1], **options)
    assert script.kind == kind
    assert script.command("python") == command


def test_travels_by_pickle_and_by_message():
    """The value survives both ways of sending it."""
    script = Script("module", "package.train", ("a b", "\udcff"))
    assert pickle.loads(pickle.dumps(script)) == script
    order = Order(3, script, {"A": "\udcff"}, "/", "", "err", ("x",))
    assert Order.from_message(order.to_message()) == order


def test_module_and_no_python_exclude_one_another():
    """The message names both options."""
    with pytest.raises(ConfigError, match=r"-m and --no-python"):
        Script.parse("train", module=True, no_python=True)


def test_an_absent_script_names_its_nearest_match(tmp_path):
    """A typo is answered with the file that was meant."""
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=r"did you mean '.*train\.py'"):
        Script("file", str(tmp_path / "trian.py")).check()
    Script("file", str(tmp_path / "train.py")).check()
    with pytest.raises(ConfigError, match="no folder"):
        Script("file", str(tmp_path / "absent" / "train.py")).check()


def test_an_absent_program_says_what_is_wanted():
    """--no-python looks in PATH, as execution will."""
    Script("binary", "sh").check()
    with pytest.raises(ConfigError, match="no such program"):
        Script("binary", "no-such-program-anywhere").check()
