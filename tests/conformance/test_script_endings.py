"""However a script begins and ends, our workers leave the output and exit code that `python -u` leaves."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from launches import light_server

from resilience_sdk.launcher.forkserver import ForkServer
from resilience_sdk.launcher.forkserver_wire import Order, Script
from resilience_sdk.system import programs

ENDINGS = {
    "returns": "print('done')",
    "empty": "",
    "exit_none": "import sys; sys.exit()",
    "exit_code": "import sys; sys.exit(7)",
    "exit_large": "import sys; sys.exit(300)",
    "exit_bool": "import sys; sys.exit(True)",
    "exit_message": "import sys; sys.exit('a message')",
    "exit_tuple": "import sys; sys.exit((1, 2))",
    "exit_in_hook": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "hard_exit": "import os; os._exit(5)",
    "raises": "def inner():\n    raise ValueError('x')\ninner()",
    "raises_from": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('y') from e",
    "raises_own": "class Odd(BaseException): pass\nraise Odd('z')",
    "recursion": "import sys\nsys.setrecursionlimit(200)\nsys.tracebacklimit = 2\ndef f(): f()\nf()",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt_by_signal": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "hook_fails": "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError('first')",
    "hook_is_seen": "import sys\nprint(sys.excepthook is sys.__excepthook__)\nraise ValueError",
    "last_values": (
        "import atexit, sys, traceback\n"
        "atexit.register(lambda: print(len(traceback.extract_tb(sys.last_traceback)), sys.last_type))\n"
        "raise ValueError('w')"
    ),
    "syntax_error": "x = (\n",
    "future": "from __future__ import annotations\nx: nothing = 1\nprint(__annotations__)",
    "no_inherited_future": "def f(a: 1 + 1): pass\nprint(f.__annotations__)",
    "latin1": "# -*- coding: latin-1 -*-\nprint(len('\xe4'))",
    "atexit_fails": "import atexit\natexit.register(lambda: 1 / 0)\nprint('end')",
    "thread_outlives_main": (
        "import threading\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('late'))).start()\nprint('main')"
    ),
    "thread_fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()",
    "finalizer": "class A:\n    def __del__(self): print('finalized')\nkeep = A()",
    "closed_stdout": "import sys; sys.stdout.close()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "sigpipe_ignored": "import signal; print(signal.getsignal(signal.SIGPIPE))",
    "dumped_object": "import pickle\nclass A: pass\nprint(pickle.dumps(A()))\nprint(A, A.__module__)",
    "source_of_main": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "exec_again": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(6 * 7)'])",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What both kinds of process get. How torch changes endings shows in the launches of the other tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENCE_", "PYTEST_", "COV_"))}
    light = light_server(tmp_path_factory.mktemp("site"))
    return {**kept, **light, "RESILIENCE_DISABLE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=["fork", "exec"])
def server(environment, request):
    """One server of each kind for all scripts."""
    server = ForkServer(mode=request.param)
    server.start(environment, Script("file", "endings"))
    assert server.ready().problem is None
    yield server
    server.close()


def by_server(server, environment, folder, script):
    """Run `script` as a worker; return its exit code, stdout and stderr."""
    out, err = folder / "stdout", folder / "stderr"
    command = tuple(programs.command(programs.WORKER, script.kind, script.target, *script.args))
    forked = server.mode == "fork"
    server.launch([Order(0, script, environment, str(folder), str(out), str(err), None if forked else command)])
    (end,) = server.exits(30.0)
    return end.code, out.read_bytes(), _without_addresses(err.read_bytes())


def by_python(environment, folder, script):
    """Run it as torchrun does."""
    command = script.command(sys.executable)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=30)
    return done.returncode, done.stdout, _without_addresses(done.stderr)


def _without_addresses(text):
    return re.sub(rb"0x[0-9a-f]{6,}", b"0x", text)


@pytest.mark.parametrize("name", ENDINGS)
def test_ends_as_under_the_interpreter(server, environment, tmp_path, name):
    """Exit code, stdout and stderr are equal byte by byte."""
    encoding = "latin-1" if name == "latin1" else "utf-8"
    (tmp_path / "script.py").write_text(ENDINGS[name], encoding=encoding)
    script = Script("file", "script.py", ("--arg", "1"))
    assert by_server(server, environment, tmp_path, script) == by_python(environment, tmp_path, script)


VIEW = (
    "import sys\n"
    "print(sys.argv, sys.path[:2], __name__, __file__, __package__, getattr(__spec__, 'name', None), "
    "type(__loader__).__name__)\n"
    "from helper import NAME\nprint(NAME)\nraise ValueError('in the end')"
)


def lay_out(folder):
    """Make one program in every shape that Python can run."""
    inner = folder / "inner"
    inner.mkdir()
    (inner / "script.py").write_text(VIEW)
    (inner / "__main__.py").write_text(VIEW)
    (inner / "helper.py").write_text("NAME = __name__")
    (folder / "helper.py").write_text("NAME = 'the wrong helper'")
    (folder / "link.py").symlink_to(inner / "script.py")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package imported as', __name__)")
    (package / "__main__.py").write_text("from . import part\n" + VIEW)
    (package / "part.py").write_text("print('part', __name__)")
    (package / "broken.py").write_text("import nothing_of_that_name")
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        for name in ("__main__.py", "helper.py"):
            archive.write(inner / name, name)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("file", "inner/script.py"),
        ("file", "./inner/script.py"),
        ("file", "inner/../inner/script.py"),
        ("file", "{folder}/inner/script.py"),
        ("file", "link.py"),
        ("file", "inner"),
        ("file", "inner/"),
        ("file", "archive.zip"),
        ("file", "absent.py"),
        ("file", "empty"),
        ("module", "package"),
        ("module", "package.__main__"),
        ("module", "package.broken"),
        ("module", "package.absent"),
        ("module", "absent.module"),
        ("module", "inner.script"),
    ],
)
def test_begins_as_under_the_interpreter(server, environment, tmp_path, kind, target):
    """Files, links, directories, archives and modules see the same names and fail with the same words."""
    lay_out(tmp_path)
    (tmp_path / "empty").mkdir()
    script = Script(kind, target.format(folder=tmp_path), ("a", "--b=1"))
    assert by_server(server, environment, tmp_path, script) == by_python(environment, tmp_path, script)


def test_a_safe_path_is_respected(environment, tmp_path):
    """With PYTHONSAFEPATH the script's folder is not put on the path."""
    if sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH came with Python 3.11")
    safe = {**environment, "PYTHONSAFEPATH": "1"}
    lay_out(tmp_path)
    script = Script("file", "inner/script.py")
    server = ForkServer(mode="fork")
    server.start(safe, script)
    try:
        assert by_server(server, safe, tmp_path, script) == by_python(safe, tmp_path, script)
    finally:
        server.close()
