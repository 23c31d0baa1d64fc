"""What the SDK says is read: on a terminal, in a log, by programs, and whenever it is said."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import pty
import random
import struct
import subprocess
import sys
import termios

import pytest

SAYING = """
from resilience_sdk.core import console
console.say("the job was asked to leave by a signal to the launcher; all ranks stopped after 40 steps, 0 steps lost")
console.say("to resume: resilience run --run-dir runs/exp1 --nproc-per-node 8 train.py --config big.yaml", wrap=False)
console.say("  report: /a/path/of/more/than/sixty/characters/which/nobody/breaks/in/two/report.md")
"""


def on_terminal(columns: int) -> list[str]:
    """Return what a process says whose standard error is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    subprocess.run([sys.executable, "-c", SAYING], stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    data = b""
    while chunk := _read(ours):
        data += chunk
    os.close(ours)
    return data.decode().replace("\r\n", "\n").splitlines()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # nobody has the other end any more
        return b""


def test_a_long_line_is_wrapped_between_words_and_a_command_or_a_path_never():
    """At 60 columns, each part with the prefix, what follows indented."""
    lines = on_terminal(60)
    assert lines[:3] == [
        "resilience: the job was asked to leave by a signal to the",
        "resilience:   launcher; all ranks stopped after 40 steps, 0",
        "resilience:   steps lost",
    ]
    assert lines[3].endswith("--nproc-per-node 8 train.py --config big.yaml")
    assert [line.split()[-1] for line in lines[4:]][-1].endswith("/in/two/report.md")


def test_a_line_stays_one_where_there_is_room_or_no_sense_in_wrapping():
    """A wide terminal, and one that is too narrow for anything."""
    assert len(on_terminal(200)) == len(on_terminal(20)) == 3


def test_a_log_has_a_message_in_one_line():
    """Nothing is wrapped where no terminal reads it: programs search it."""
    done = subprocess.run([sys.executable, "-c", SAYING], stderr=subprocess.PIPE, text=True, check=True, timeout=60)
    assert len(done.stderr.splitlines()) == 3


TALKING = """
import threading
from resilience_sdk.core import console

def talk():
    while True:
        console.say("still here " * 50)

for _ in range(3):
    threading.Thread(target=talk, daemon=True).start()
"""


def test_a_daemon_thread_may_speak_while_the_interpreter_shuts_down():
    """Python aborts where a daemon thread holds the lock of a standard stream at the end; ours never takes it."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", TALKING],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0


def said(code: str) -> list[str]:
    """Return the lines of a process that runs `code`, which finds `say` and `console`."""
    code = f"from resilience_sdk.core import console; from resilience_sdk.core.console import say\n{code}"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


def test_the_structlog_of_the_user_is_left_alone():
    """Its configuration and bound variables neither show in our lines nor change, and its lines are as they were."""
    assert said(
        """
import sys, structlog
def marked(logger, method, facts):
    return f"theirs {sorted(facts)}"
structlog.configure(processors=[structlog.contextvars.merge_contextvars, marked], context_class=dict,
                    logger_factory=structlog.PrintLoggerFactory(sys.stderr), cache_logger_on_first_use=True)
structlog.contextvars.bind_contextvars(user=1)
before, log = structlog.get_config(), structlog.get_logger()
log.info("one")
console.bind(rank=3)
say("ours")
log.info("two")
assert structlog.get_config() == before
"""
    ) == ["theirs ['event', 'user']", "resilience: ours", "theirs ['event', 'user']"]


def test_json_tells_who_speaks():
    """One object per message, whatever lines it has, and what a process knows of itself from then on."""
    code = "console.bind(node='a', rank=1); say('one\\ntwo'); console.bind(attempt=2); say('x')"
    first, second = map(json.loads, said(f"console.use_json(True); {code}"))
    assert datetime.datetime.fromisoformat(first.pop("timestamp").replace("Z", "+00:00"))
    assert first == {"event": "one\ntwo", "level": "info", "node": "a", "rank": 1}
    assert (second["event"], second["attempt"], second["rank"]) == ("x", 2, 1)


WHILE_IT_LOADS = """
import importlib.abc, os, signal, sys, threading
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "structlog":
            {meanwhile}
sys.meta_path.insert(0, Slow())
say("last")
"""


@pytest.mark.parametrize(
    "meanwhile",
    [
        "signal.signal(signal.SIGUSR1, lambda *_: say('first')); signal.raise_signal(signal.SIGUSR1)",
        "thread = threading.Thread(target=say, args=('first',)); thread.start(); thread.join()",
        "pid = os.fork(); (say('first'), os._exit(0)) if pid == 0 else os.waitpid(pid, 0)",
    ],
)
def test_nobody_waits_for_an_import_to_say_something(meanwhile: str):
    """A signal handler, another thread and a forked child may speak while structlog is being loaded."""
    assert said(WHILE_IT_LOADS.format(meanwhile=meanwhile)) == ["resilience: first", "resilience: last"]


@pytest.mark.parametrize(
    "code",
    [
        "import atexit; atexit.register(say, 'a line')",
        "import sys; sys.modules['structlog'] = None; say('a line')",
        "import sys, types; sys.modules['structlog'] = types.ModuleType('structlog'); say('a line')",
        "import sys; console.stay_light(); say('a line'); assert 'structlog' not in sys.modules",
        "class Last:\n    def __del__(self, say=say): say('a line')\nlast = Last()",
    ],
)
def test_the_text_is_the_same_without_structlog(code: str):
    """At the end of a process, where it is missing or another, and in a process that has to stay small."""
    assert said(code) == ["resilience: a line"]


def test_the_first_line_draws_no_random_number():
    """What is loaded for it may: rich does, and the training would go on with other numbers than without the SDK."""
    code = (
        "import random; from resilience_sdk.core import console; random.seed(1); console.say('a'); "
        "import sys; print('structlog' in sys.modules, random.random())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said == f"True {random.Random(1).random()}\n"
