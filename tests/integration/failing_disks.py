"""Saves onto disks that fail in the ways that disks fail, and prints what was left as JSON. Needs root.

    unshare --mount failing_disks.py ROOT

`full` and `read-only` are real mounts, `permission` is another user, `io-error` a kernel filter that answers fsync
with EIO. Each case is a forked process, so that torch is imported once.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import forked
import torch
import torch.distributed.checkpoint
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError
from resilience_sdk.checkpoint.store import verify_checkpoint
from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.errors import NotSavedError
from resilience_sdk.recorder import lookup

NOBODY = 65534
SIZE = 64 * 1024  # of the parameters, in numbers of 4 bytes


def mount(place, *options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(["mode=0700", *options]), "tmpfs", place], check=True)


def remount(place, option):
    subprocess.run(["mount", "-o", f"remount,{option}", place], check=True)


def refuse_fsync():
    """Let every fsync and fdatasync of this process fail with EIO from now on, by a seccomp filter."""
    numbers = {"x86_64": (74, 75), "aarch64": (82, 83)}[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06
    program = struct.pack("HBBI", load, 0, 0, 0)
    program += struct.pack("HBBI", equal, 2, 0, numbers[0]) + struct.pack("HBBI", equal, 1, 0, numbers[1])
    program += struct.pack("HBBI", give, 0, 0, 0x7FFF0000) + struct.pack("HBBI", give, 0, 0, 0x00050000 | errno.EIO)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_char_p(header)) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP


def break_disk(kind, place):
    """Break it; return how to mend it, or None where that is not possible in this process."""
    if kind == "full":
        ballast = place / "ballast"
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, ballast.stat().st_size - 100 * 1024)  # the small files fit, the state does not
        return ballast.unlink
    if kind == "read-only":
        remount(place, "ro")
        return lambda: remount(place, "rw")
    if kind == "permission":
        place.chmod(0o500)
        return lambda: place.chmod(0o700)
    refuse_fsync()
    return None


def case(root, kind, in_background):
    run_dir = root / f"{kind}-{in_background}"
    place = run_dir / "checkpoints"
    place.mkdir(parents=True)
    run_dir.chmod(0o700)
    if kind in ("full", "read-only"):
        mount(place, "size=2m")
    if kind == "permission":
        os.chown(run_dir, NOBODY, NOBODY)
        os.chown(place, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    place.chmod(0o700)
    (run_dir / "journal").mkdir()
    journal = Journal(run_dir / "journal", writer="rank0", host="h", boot_id="b", job="j")
    state = {"weight": torch.zeros(SIZE), "model": nn.Linear(2, 2)}
    options = {"run_dir": run_dir, "every": 1, "journal": journal, "in_background": in_background}
    checkpointer = Checkpointer(state, **options)

    def save(step):
        if not in_background:
            return checkpointer.save(step)
        return checkpointer.maybe_save(step) and checkpointer.wait(60) and checkpointer.last_good.step == step

    report = {"saved": [save(1), save(2)]}
    mend = break_disk(kind, place)
    report["failed"] = [save(3), save(4)]
    try:
        checkpointer.save(4, last=True)
    except NotSavedError as error:
        report["lost"] = str(error)
    report["waits"] = [event["ok"] for event in read_journal(run_dir / "journal").events if event["event"] == "health"]
    report["last good"] = checkpointer.last_good.step
    valid = []
    for path in sorted(place.glob("step-*")):
        try:
            valid.append(verify_checkpoint(path).step)
        except InvalidCheckpointError as error:
            report["damaged"] = str(error)
    report["valid"] = valid
    report["debris"] = [path.name for path in place.glob(".tmp-*")]
    report["events"] = [
        [event["step"], event["error"]]
        for event in read_journal(run_dir / "journal").events
        if event["event"] == "ckpt_fail"
    ]
    if mend is not None:
        mend()
        report["mended"] = save(5)
    report["resumed"] = Checkpointer(state, **options).resume()
    print(json.dumps(report), flush=True)


def main(root):
    # What torch imports late, it could not read as another user.
    lookup.disable()
    Checkpointer({"weight": torch.zeros(2)}, run_dir=root / "first").save(1)
    os.environ["RESILIENCE_WAIT_LIMIT"] = "0.5"
    results = {}
    for kind in ("full", "read-only", "permission", "io-error"):
        for in_background in (False, True):
            name = f"{kind}-{in_background}"
            code, said = forked.run(lambda kind=kind, behind=in_background: case(root, kind, behind))
            results[name] = {"code": code, **(json.loads(said) if code == 0 else {})}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
