"""What a script can observe of the process it runs in, as plain JSON values."""

import gc
import locale
import logging
import multiprocessing
import multiprocessing.process
import os
import resource
import signal
import stat
import sys
import threading
import time


def early():
    """Facts to take before anything else is imported."""
    return {
        "task_count": len(os.listdir("/proc/self/task")),
        "descriptors": lasting_descriptors(),
        "main": main_namespace(),
        "excepthook_is_default": sys.excepthook is sys.__excepthook__,
        "path": list(sys.path),
        "argv": list(sys.argv),
        "orig_argv": list(sys.orig_argv),
    }


def lasting_descriptors():
    """Without what a thread has open for a moment, such as a file of /proc."""
    first = descriptors()
    time.sleep(0.02)
    return {fd: what for fd, what in descriptors().items() if first.get(fd) == what}


def descriptors():
    found = {}
    for fd in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            mode = os.fstat(int(fd)).st_mode
            found[fd] = [
                stat.filemode(mode)[0],
                os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split(":")[0],
            ]
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def main_namespace():
    main = sys.modules["__main__"]
    values = dict(vars(main))
    return {
        "name": values["__name__"],
        "file": values.get("__file__"),
        "package": values.get("__package__"),
        "spec": repr(getattr(values.get("__spec__"), "name", None)),
        "loader": type(values.get("__loader__")).__name__,
        "cached": values.get("__cached__"),
        "builtins": type(values.get("__builtins__")).__name__,
        "doc": values.get("__doc__"),
        "names": sorted(name for name in values if name.startswith("__")),
        "is_module": type(main).__name__,
    }


def handlers():
    return {
        signal.Signals(number).name: str(getattr(handler, "__name__", handler))
        for number in sorted(signal.valid_signals())
        if number in list(signal.Signals) and (handler := signal.getsignal(number)) is not None
    }


def status_lines():
    with open("/proc/self/status") as status:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    facts = {name: lines[name] for name in ("SigBlk", "SigIgn", "Umask", "NoNewPrivs")}
    # The C library takes 32 and 33 for itself with the first thread, and an imported library may have had
    # one.
    facts["SigCgt"] = hex(int(lines["SigCgt"], 16) & ~(0b11 << 31))
    return facts


def process():
    me = multiprocessing.current_process()
    return {
        "name": me.name,
        "daemon": me.daemon,
        "identity": list(me._identity),
        "parent_process": repr(multiprocessing.parent_process()),
        "children": len(multiprocessing.active_children()),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "original_dir": multiprocessing.process.ORIGINAL_DIR,
        "session_leader": os.getsid(0) == os.getpid(),
        "group_leader": os.getpgid(0) == os.getpid(),
        "command_line": open("/proc/self/cmdline").read().replace("\0", " ").strip(),
        "comm": open("/proc/self/comm").read(),
        "cwd": os.getcwd(),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_CORE", "RLIMIT_NOFILE")},
        "oom": open("/proc/self/oom_score_adj").read(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "native_id": threading.main_thread().native_id == os.getpid(),
        "threads": [thread.name for thread in threading.enumerate()],
        "executable": sys.executable,
    }


def streams():
    return {
        name: [
            stream.line_buffering,
            stream.write_through,
            stream.encoding,
            stream.errors,
            stream.isatty(),
            type(stream.buffer).__name__,
            stream.name,
            stream.fileno(),
        ]
        for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr))
    }


def interpreter():
    import asyncio
    import faulthandler

    try:
        asyncio.get_running_loop()
        loop = True
    except RuntimeError:
        loop = False
    return {
        "flags": repr(sys.flags),
        "gc": [gc.isenabled(), list(gc.get_threshold())],
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "trace": repr(sys.gettrace()) + repr(sys.getprofile()),
        "hooks": [sys.displayhook is sys.__displayhook__, threading.excepthook is threading.__excepthook__],
        "wakeup_fd": signal.set_wakeup_fd(-1),
        "root_handlers": repr(logging.getLogger().handlers),
        "root_level": logging.getLogger().level,
        "locale": locale.setlocale(locale.LC_ALL),
        "faulthandler": faulthandler.is_enabled(),
        "running_loop": loop,
        "meta_path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    }


def torch_facts():
    import torch

    return {
        "num_threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda_initialized": torch.cuda.is_initialized(),
        "bad_fork": torch.cuda._is_in_bad_fork(),
        "distributed": torch.distributed.is_initialized(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "debug_level": str(torch.distributed.get_debug_level()),
    }


def draws():
    """Random numbers that must differ between ranks and between attempts."""
    import random
    import uuid

    import numpy as np
    import torch

    return {
        "random": random.random(),
        "numpy": float(np.random.rand()),
        "numpy_generator": float(np.random.default_rng().random()),
        "torch": float(torch.rand(())),
        "torch_seed": torch.initial_seed(),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        "uuid": str(uuid.uuid4()),
    }


def all_facts(first):
    return {
        **first,
        "handlers": handlers(),
        "status": status_lines(),
        "process": process(),
        "streams": streams(),
        "interpreter": interpreter(),
        "torch": torch_facts(),
        "environment": dict(os.environ),
        "path_after_torch": list(sys.path),
        "draws": draws(),
    }
