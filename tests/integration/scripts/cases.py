"""Runs command lines of `resilience` in children of one warm process, as what `run` needs takes seconds to load.

Reads a JSON list of `{argv, env, uid}` from standard input and prints a JSON list of `[code, out, err]`.
"""

import contextlib
import io
import json
import os
import sys
import tempfile

from resilience_sdk.cli.main import main


def run(case: dict) -> tuple[int, str, str]:
    """Run one case in a child and return exit code and what it printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(case.get("env", {}))
            if "uid" in case:
                os.setgroups([])
                os.setresgid(case["uid"], case["uid"], case["uid"])
                os.setresuid(case["uid"], case["uid"], case["uid"])
            code = 1
            try:
                code = main(case["argv"])
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


# Loads what a command needs, which another user may not be able to read.
LOADING = {"run": "--no-such-option", "status": "/", "why": "/", "outcome": "/", "report": "/"}

cases = json.load(sys.stdin)
with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
    for command in {case["argv"][0] for case in cases}:
        main([command, LOADING[command]])
print(json.dumps([run(case) for case in cases]))
