"""A worker like torchrun's, made of a fresh process.

Both kinds of worker end here: the child of the fork server and the process of `programs.WORKER`. A
script must not be able to tell them from `python -u script.py`, so everything that the interpreter does for
a script by itself is left to the interpreter: the script's exception is not handled here but passes
through, and the process ends by the normal shutdown, with its atexit handlers, thread joins and exit codes.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import random
import runpy
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.launcher.forkserver_wire import Script
from resilience_sdk.system import programs
from resilience_sdk.system.linux import show_command_line

_RUNNER = __file__
screens: dict[int, int] = {}
"""Where a standard stream (1, 2) went before it was led into a file."""


def handed_on_screens(command: Sequence[str]) -> dict[str, str]:
    """Return the variable by which a worker that is executed learns of `screens`, which it inherits then.

    Only `programs.WORKER` does: any other command has the three descriptors of torch's workers.
    """
    if programs.WORKER.code not in command or not screens:
        return {}
    for screen in screens.values():
        os.set_inheritable(screen, True)
    return {environ.INTERNAL_SCREENS: ",".join(f"{fd}:{screen}" for fd, screen in screens.items())}


def _take_screens() -> None:
    given = environ.environment().pop(environ.INTERNAL_SCREENS, "")
    with contextlib.suppress(OSError, ValueError):
        for pair in filter(None, given.split(",")):
            fd, screen = map(int, pair.split(":"))
            os.set_inheritable(screen, False)
            screens[fd] = screen


def _close_screens() -> None:
    """Leave no descriptor that torchrun's workers do not have."""
    while screens:
        with contextlib.suppress(OSError):
            os.close(screens.popitem()[1])


def run(words: Sequence[str]) -> None:
    """Run the script that the command line names: its kind, the target, its arguments."""
    kind, target, *args = words
    _take_screens()
    run_script(Script(kind, target, tuple(args)))  # type: ignore[arg-type]


def run_script(script: Script, *, bootstrapped: Callable[[], None] = lambda: None) -> None:
    """Run `script` as this process's `__main__`, once, in the main thread.

    `bootstrapped` is called once this rank has its page, before anything of the script runs.

    Returns when the script does, and raises whatever it raises, `SystemExit` included: the caller lets it
    pass and lets the interpreter end, which is what makes exit codes and shutdown equal to those of `python
    script.py`.
    """
    command = script.command(sys.executable)
    sys.orig_argv = command
    sys.argv = [script.target, *script.args]
    show_command_line(command)
    # A new module, so that nothing of our entry point is visible; the old one stays alive in our frames.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    _bootstrap()
    bootstrapped()
    try:
        if script.kind == "module":
            _insert_path(os.getcwd())
            sys.argv[0] = "-m"  # until the module is found
            # What `python -m` itself calls, so that errors and tracebacks read the same.
            runpy._run_module_as_main(script.target)  # type: ignore[attr-defined]
        else:
            _run_file(script.target, main)
    except SystemExit as ending:
        _note_code(ending)
        raise
    except BaseException as error:
        _hand_over(error)
        raise


def freshen() -> None:
    """Undo what a process inherits from the fork server and would not have after exec. Call before
    `run_script`.

    `random` reseeds itself after a fork; torch and numpy do not, so every rank would draw the same numbers.
    CUDA generators are left alone: they seed themselves when CUDA starts.
    """
    importlib.invalidate_caches()
    main_thread: Any = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
        multiprocessing.current_process().authkey = os.urandom(32)
        # Where spawned children go first; the server may have been started elsewhere.
        multiprocessing.process.ORIGINAL_DIR = os.getcwd()
        if multiprocessing.get_start_method(allow_none=True) is not None:
            # A preloaded module chose one; the script has not.
            multiprocessing.set_start_method(None, force=True)


def replace_environment(wanted: Mapping[str, str]) -> None:
    """Make the environment of this process equal to `wanted`, for Python and for C libraries."""
    env = environ.environment()
    for name in [name for name in env if name not in wanted]:
        del env[name]
    for name, value in wanted.items():
        if env.get(name) != value:
            env[name] = value


def _run_file(path: str, main: types.ModuleType) -> None:
    # As the interpreter does it: made absolute, but not normalised.
    absolute = os.path.join(os.getcwd(), path)
    if _is_archive(path):
        # A directory or zip archive: `python path` puts it on the path and runs its __main__ module.
        sys.path.insert(0, absolute)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        _cannot_open(absolute, error)
    _insert_path(os.path.dirname(os.path.realpath(absolute)))
    main.__dict__.update(
        __file__=absolute,
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
        __cached__=None,
    )
    # dont_inherit: our own `from __future__` must not reach the script.
    code = compile(source, absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - running the user's script is what a worker is for


def _is_archive(path: str) -> bool:
    if os.path.isdir(path):
        return True
    try:
        import zipimport

        zipimport.zipimporter(path)
    except ImportError:
        return False
    return True


def _cannot_open(path: str, error: OSError) -> NoReturn:
    sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
    raise SystemExit(2)


def _insert_path(folder: str) -> None:
    """Put the script's folder first, where the interpreter would have done so (PYTHONSAFEPATH forbids it)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _bootstrap() -> None:
    """Create the rank's page before user code; the SDK's failure never stops the script."""
    if environ.is_disabled(environ.environment()):
        _close_screens()
        return
    try:
        from resilience_sdk.rank import bootstrap_worker, keep_output

        keep_output(screens)
        bootstrap_worker()
    except Exception as error:  # noqa: BLE001 - never hurt the run
        say_once("bootstrap", f"this rank runs unwatched: its session did not start ({_describe(error)})")


def _hand_over(error: BaseException) -> None:
    """Record the script's exception, and have the interpreter print it without the frames of this file.

    The interpreter calls `sys.excepthook` after the exception has left all frames, so the hook is wrapped
    only now: a script that looks at or replaces `sys.excepthook` finds what it would find anywhere.
    """
    clean = _without_runner(error.__traceback__)
    error.__traceback__ = clean
    _record(error)
    hook = sys.excepthook

    def print_clean(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        if value is error:
            sys.last_traceback = trace = clean
            value.__traceback__ = clean
        try:
            hook(kind, value, trace)
        except Exception as failure:  # noqa: BLE001 - reported as the interpreter does, less our frame
            sys.stderr.write("Error in sys.excepthook:\n")
            failure.__traceback__ = _without_runner(failure.__traceback__)
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, value, trace)

    sys.excepthook = print_clean


def _without_runner(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == _RUNNER:
        trace = trace.tb_next
    return trace


def _note_code(ending: SystemExit) -> None:
    if environ.is_disabled(environ.environment()):
        return
    try:
        from resilience_sdk.rank import leave_with

        leave_with(ending.code)
    except Exception as failure:  # noqa: BLE001 - it counts only if the process is ended otherwise
        say_once("record", f"the exit code of this rank's script was not recorded ({_describe(failure)})")


def _record(error: BaseException) -> None:
    try:
        from resilience_sdk.rank.exceptions import write_error_file

        write_error_file(error)  # where the SDK is disabled, too: it is what torchrun's `@record` would leave
        if not environ.is_disabled(environ.environment()):
            from resilience_sdk.rank import record_exception

            record_exception(error)
    except Exception as failure:  # noqa: BLE001 - the script's own exception matters more
        say_once("record", f"the exception of this rank was not recorded ({_describe(failure)})")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
