"""Waits of `standing.py`: for another process that feeds a pipe, and for a thread which it answers.

Process and thread are there before the loop: `prepare()` starts them.
"""

import asyncio
import contextlib
import ctypes
import logging
import logging.handlers
import math
import os
import queue
import socketserver
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

_FEEDER = """
import sys, time
for line in sys.stdin:
    time.sleep(float(line))
    sys.stdout.write("x")
    sys.stdout.flush()
"""


class Feeder:
    """A process that writes a byte some seconds after it was asked to."""

    def __init__(self):
        command = [sys.executable, "-S", "-c", _FEEDER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait(self, seconds):
        """Wait for the byte; for ever where that is infinite."""
        if not math.isinf(seconds):
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.flush()
        os.read(self._process.stdout.fileno(), 1)


class Worker(threading.Thread):
    """A thread that waits for the feeder when it is asked, and then says so in all ways."""

    def __init__(self):
        super().__init__(name="worker", daemon=True)
        self.asked, self.answers = queue.Queue(), queue.Queue()
        self.feeder, self.event = Feeder(), threading.Event()
        self.condition, self.barrier = threading.Condition(), threading.Barrier(2)
        self.libc, self.mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        self.start()

    def run(self):
        """Serve one question."""
        how, seconds = self.asked.get()
        self.feeder.wait(seconds)
        if how == "barrier":
            self.barrier.wait()
        elif how == "native":
            self.libc.pthread_mutex_unlock(self.mutex)
        self.answers.put(how)
        self.event.set()
        with self.condition:
            self.condition.notify_all()

    def ask(self, how, seconds):
        """Ask it, and return it."""
        self.asked.put((how, seconds))
        return self


WORKERS = {}
POOL = []
FEEDERS = []


def prepare(names):
    """Start what these waits need."""
    for name in names:
        if name in ("event", "condition", "barrier", "joined", "queued", "native"):
            WORKERS[name] = Worker()
        if name in ("pooled", "looped"):
            POOL.append(ThreadPoolExecutor(1))
            POOL[-1].submit(int).result()
        if name in ("piped", "pooled", "looped"):
            FEEDERS.append(Feeder())
        if name == "housed":
            keep_house()


def piped(seconds):
    """On a pipe that another process feeds."""
    FEEDERS[0].wait(seconds)


def event(seconds):
    """On an Event that a thread sets."""
    WORKERS["event"].ask("event", seconds).event.wait()


def condition(seconds):
    """On a Condition."""
    worker = WORKERS["condition"]
    with worker.condition:
        worker.ask("condition", seconds).condition.wait()


def barrier(seconds):
    """On a Barrier of two threads."""
    WORKERS["barrier"].ask("barrier", seconds).barrier.wait()


def joined(seconds):
    """For the end of a thread."""
    WORKERS["joined"].ask("joined", seconds).join()


def queued(seconds):
    """On a queue that a thread fills."""
    WORKERS["queued"].ask("queued", seconds).answers.get()


def native(seconds):
    """On a lock of native code that a thread gives back."""
    worker = WORKERS["native"]
    worker.libc.pthread_mutex_lock(worker.mutex)
    worker.ask("native", seconds).libc.pthread_mutex_lock(worker.mutex)


def pooled(seconds):
    """For a future of a pool."""
    POOL[0].submit(FEEDERS[0].wait, seconds).result()


def looped(seconds):
    """In a loop of asyncio, for a thread of its."""

    async def wait():
        await asyncio.get_running_loop().run_in_executor(POOL[0], FEEDERS[0].wait, seconds)

    asyncio.run(wait())


def slept_in_a_loop(seconds):
    """In a loop of asyncio, for a time."""
    asyncio.run(asyncio.sleep(seconds))


def timer(seconds):
    """On an Event that a Timer sets."""
    done = threading.Event()
    clock = threading.Timer(1e6 if math.isinf(seconds) else seconds, done.set)
    clock.daemon = True
    clock.start()
    done.wait()


def unread(_):
    """In `torch.save`, whose file is a FIFO that nobody reads."""
    import torch

    path = os.path.join(tempfile.mkdtemp(dir=os.environ["TOLD"]), "model.pt")
    os.mkfifo(path)
    torch.save({"weights": torch.ones(4)}, path)


def keep_house():
    """Start the threads that keep house in many trainings: a server, a logger's queue, a bar."""
    server = socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    logging.handlers.QueueListener(queue.Queue(), logging.NullHandler()).start()
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm(range(2), file=open(os.devnull, "w")).update()  # noqa: SIM115 - a bar that is never closed


def housed(_):
    """On a lock, beside such threads only."""
    held = threading.Lock()
    held.acquire()
    held.acquire()


WAITS = (
    *(piped, event, condition, barrier, joined, queued, native, pooled, looped),
    *(slept_in_a_loop, timer, housed, unread),
)
