"""Records what ranks in known states look like from outside, as the data of tests/unit/hang/test_activity.py.

    python -m tests.bench.record_activity tests/unit/hang/data/activity.json

Each program is put into its state by itself or, where a state needs two ranks, with a peer over gloo, and is sampled
once a second for ten seconds. States that need the machine are recorded one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs

from resilience_sdk.hang.samples import ActivitySample
from resilience_sdk.monitor.activity import take_sample

SAMPLES = 11
_PAIR = """
import os, threading, time, torch, torch.distributed as dist
torch.set_num_threads(1)
def begin(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="@PORT@", RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
peer = os.fork() == 0
"""
_HOUSEKEEPING = """
import threading, time, subprocess, sys
def tick():
    while True: time.sleep(0.1)
def log():
    out = open("/dev/null", "w")
    while True: out.write("x" * 1000); out.flush(); time.sleep(1)
for work in (tick, log): threading.Thread(target=work, daemon=True).start()
subprocess.Popen(["sh", "-c", "while true; do echo hello; sleep 0.1; done"], stdout=subprocess.DEVNULL)
"""
_STUCK = {
    "sleep": "import time; time.sleep(1e6)",
    "lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "event": "import threading; threading.Event().wait()",
    "asleep in C with the GIL held": "import ctypes; ctypes.PyDLL(None).sleep(1000000)",
}
# What is recorded: expected kind, what it is blocked on, the program.
CASES: dict[str, tuple[str, str, str]] = {
    **{name: ("stuck", "", code) for name, code in _STUCK.items()},
    **{f"{name}, beside housekeeping": ("stuck", "", _HOUSEKEEPING + code) for name, code in _STUCK.items()},
    "socket of a dead peer": ("stuck", "a socket", "import socket; a, b = socket.socketpair(); a.recv(1)"),
    "empty pipe": ("stuck", "a pipe", "import os; r, w = os.pipe(); os.read(r, 1)"),
    "child that sleeps": ("stuck", "a child process", "import subprocess; subprocess.run(['sleep', '1000000'])"),
    "stopped": ("stopped", "", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"),
    "stopped DataLoader worker": (
        "stuck",
        "",
        _HOUSEKEEPING
        + """
import os, signal, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, n):
        if n == 3: os.kill(os.getpid(), signal.SIGSTOP)
        return torch.zeros(1)
for _ in torch.utils.data.DataLoader(Data(), num_workers=1): pass
""",
    ),
    "polls each 100 ms": ("polling", "", "import time\nwhile True: time.sleep(0.1)"),
    "polls each ms": ("polling", "", "import time\nwhile True: time.sleep(0.001)"),
    "polls a file twice a second": ("polling", "", "import os, time\nwhile not os.path.exists('/no'): time.sleep(0.5)"),
    "spins": ("busy", "", "while True: pass"),
    "computes": ("busy", "", "import torch\nwhile True: torch.randn(200, 200) @ torch.randn(200, 200)"),
    "computes in bursts": ("busy", "", "import time\nwhile True:\n  sum(range(400000)); time.sleep(1.5)"),
    "computes on two threads": (
        "busy",
        "",
        "import torch; torch.set_num_threads(2); a = torch.randn(2000, 2000)\nwhile True: a @ a",
    ),
    "writes and fsyncs": (
        "busy",
        "",
        "import os, tempfile, time\nf = tempfile.TemporaryFile()\n"
        "while True: f.write(b'x' * 100000); f.flush(); os.fsync(f.fileno()); time.sleep(0.5)",
    ),
    "saves a large checkpoint": (
        "busy",
        "",
        "import tempfile, torch; t = torch.zeros(30000000)\nwhile True: torch.save(t, tempfile.TemporaryFile())",
    ),
    "collects garbage": ("busy", "", "import gc; x = [[] for _ in range(10**6)]\nwhile True: gc.collect()"),
    "slow pipe": (
        "busy",
        "",
        "import os, subprocess\n"
        "p = subprocess.Popen(['sh', '-c', 'while true; do echo hi; sleep 1; done'], stdout=subprocess.PIPE)\n"
        "while True: os.read(p.stdout.fileno(), 100)",
    ),
    "download": (
        "busy",
        "",
        "import os, socket, time; a, b = socket.socketpair()\n"
        "if os.fork() == 0:\n"
        "  while True: b.send(b'x' * 1000); time.sleep(0.1)\n"
        "while True: a.recv(65536)",
    ),
    "subprocess that computes": (
        "busy",
        "",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    ),
    "polls a subprocess that computes": (
        "busy",
        "",
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "while p.poll() is None: time.sleep(0.5)",
    ),
    "DataLoader worker that computes": (
        "busy",
        "",
        """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, n):
        while True: pass
for _ in torch.utils.data.DataLoader(Data(), num_workers=1): pass
""",
    ),
    "compiles": (
        "busy",
        "",
        "import itertools, subprocess, tempfile\n"
        "body = ''.join(f'int f{n}(int a){{int s=0;for(int i=0;i<a;i++)s+=i*{n};return s;}}' for n in range(3000))\n"
        "path = tempfile.mktemp(suffix='.c'); open(path, 'w').write(body)\n"
        "while True: subprocess.run(['gcc', '-O3', '-c', '-o', '/dev/null', path])",
    ),
    "thread that computes": (
        "unknown",
        "",
        "import hashlib; from concurrent.futures import ThreadPoolExecutor\n"
        "def work():\n  while True: hashlib.sha256(bytes(10**8))\n"
        "ThreadPoolExecutor(1).submit(work).result()",
    ),
    "lock beside prefetching workers": (
        "unknown",
        "",
        "import subprocess, sys, threading; p = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    ),
    "gloo all_reduce": (
        "waiting",
        "",
        _PAIR + "begin(int(peer))\nif peer: time.sleep(1e6)\ndist.all_reduce(torch.zeros(1))",
    ),
    "store": (
        "stuck",
        "poll",
        _PAIR + "begin(int(peer))\nif peer: time.sleep(1e6)\ndist.distributed_c10d._get_default_store().get('never')",
    ),
    "rendezvous": ("polling", "", _PAIR + "if peer: time.sleep(1e6)\nbegin(0)"),
}
_IN_COLLECTIVE = ("gloo all_reduce",)


def record(name: str) -> list[ActivitySample]:
    """Return samples of one state, from when the program has settled in it."""
    program = CASES[name][2].replace("@PORT@", str(29000 + os.getpid() % 1000 + list(CASES).index(name)))
    process = subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(8.0 if "torch" in program else 2.0)
        samples: list[ActivitySample] = []
        for _ in range(SAMPLES):
            known = samples[-1].others if samples else {}
            samples.append(take_sample(process.pid, process.pid, known=known))
            time.sleep(1.0)
        if process.poll() is not None:
            raise RuntimeError(f"the program of {name!r} ended with {process.returncode}")
        return samples
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Record all states, or those whose names follow the path."""
    path, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        samples = record(name)
        known[name] = {
            "kind": CASES[name][0],
            "on": CASES[name][1],
            "in_collective": name in _IN_COLLECTIVE or None,
            "samples": [attrs.asdict(sample) for sample in samples],
        }
        path.write_text(json.dumps(known, indent=None, separators=(",", ":")) + "\n")
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
