"""Two processes with a `Checkpointer` over one directory: plain ones, forked from here so that torch is imported once.

    one_writer.py ROOT

Prints what happened as one JSON line. This process itself takes no part, and is no rank of anybody's.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import forked
import torch
import torch._dynamo  # imported once here instead of in every process

from resilience_sdk import preemption
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.cli.preempt import ask
from resilience_sdk.cli.status import collect
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import ConfigError, DirectoryInUseError

PATIENCE_S = 60


def make(place, **options):
    return Checkpointer({"weight": torch.ones(3)}, run_dir=place, every=1, **options)


class Holder:
    """A process that resumes, saves `steps` steps, and then waits until it is told to look who asks it to leave."""

    def __init__(self, place, steps):
        told, self._tell = os.pipe()
        self._heard, say = os.pipe()

        def live():
            os.close(self._tell)
            self._live(place, steps, told, say)

        self.pid = forked.start(live)
        os.close(told)
        os.close(say)
        self.first = self.hear()

    def _live(self, place, steps, told, say):
        checkpointer = make(place)
        first = checkpointer.resume()
        for step in range(first, first + steps):
            checkpointer.maybe_save(step + 1)
        os.write(say, f"{first}\n".encode())
        while os.read(told, 1):
            end = time.monotonic() + PATIENCE_S
            while not (asked := preemption.check()) and time.monotonic() < end:
                time.sleep(0.01)
            os.write(say, b"asked\n" if asked else b"never\n")

    def hear(self):
        said = b""
        while not said.endswith(b"\n") and (more := os.read(self._heard, 1)):
            said += more
        return said.decode().strip()

    def is_asked(self):
        os.write(self._tell, b"?")
        return self.hear()

    def end(self):
        os.close(self._tell)
        return forked.wait([self.pid])

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        forked.wait([self.pid])


def attempt(action):
    """Return what a process of its own got, or how it was refused."""

    def work():
        try:
            print(action())
        except (DirectoryInUseError, ConfigError) as error:
            print(f"{type(error).__name__}: {error}")

    return forked.run(work)[1].strip()


def read(place):
    reader = make(place, read_only=True)
    step = reader.resume()
    try:
        reader.save(step + 1)
    except ConfigError as error:
        return f"{step}, {error}"
    return "saved"


def main(root):
    place, report = root / "run", {}
    holder = Holder(place, 2)
    report["holder"] = [holder.pid, holder.first]
    report["second resumes"] = attempt(lambda: make(place).resume())
    report["second saves"] = attempt(lambda: make(place).save(5))
    report["reads"] = attempt(lambda: read(place))
    report["elsewhere"] = attempt(lambda: make(root / "other").save(1))
    run_dir = RunDirectory.open(place)
    status = collect(run_dir)
    report["status"] = [status["state"], status["checkpoint"]["step"], [rank["pid"] for rank in status["live"]]]
    report["preempt"] = [ask(run_dir, "by a test")["job"] == status["job"], holder.is_asked()]
    holder.kill()
    holder = Holder(place, 1)
    report["after a kill"] = holder.first
    report["ended"] = holder.end()
    report["after an end"] = attempt(lambda: make(place).resume())
    os.environ["RESILIENCE_JOB_ID"] = "one name for two"
    holder = Holder(root / "named", 1)
    report["namesake"] = [holder.pid, attempt(lambda: make(root / "named").resume())]
    holder.kill()
    report["directories"] = sorted(path.name for path in root.iterdir())
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
