"""Makes the failures whose logs lie beside this file: real processes, and what they print.

python -m tests.labelled.make [NAME...]

Some need root and Linux's namespaces (a small `/dev/shm`, a limit of processes of another user, a network that goes
down). Paths, host names, process ids of nobody's interest are replaced by neutral ones; `labels.tsv` says what each
log is. Logs differ from one making to the next in their clocks and numbers only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parent
_LIMIT_S = 60
_TORCHRUN = "torchrun --nproc-per-node={ranks} --master-port=0 --rdzv-backend=c10d --rdzv-endpoint=localhost:0"
_ALONE = (
    "export WORLD_SIZE={ranks} MASTER_ADDR=127.0.0.1 MASTER_PORT=29517; "
    "for rank in {numbers}; do RANK=$rank python train.py & done; wait"
)
_NEUTRAL = (
    (re.compile(r"(?:/[\w.+-]+)*/site-packages/"), "/opt/venv/lib/python3.11/site-packages/"),
    (re.compile(r"(?:/[\w.+-]+)*/bin/(python[\d.]*|torchrun)\b"), r"/opt/venv/bin/\1"),
    (re.compile(r"(?:/[\w.+-]+)*/lib/python3\.\d+/(?!site-packages)"), "/usr/lib/python3.11/"),
)


@attrs.frozen
class Failure:
    """One failure: the programs that it needs and the command that runs them, both in a directory of its own."""

    command: str
    files: dict[str, str]


def _train(body: str, *, ranks: int = 2, seconds: int = 5, before: str = "", after: str = "") -> Failure:
    """A job of a few ranks on gloo; `body` has `rank`, `world`, `say(text)` and `step()`."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    program = f"""\
import datetime, faulthandler, logging, os, signal, sys, time
import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                    format=f"%(asctime)s %(levelname)s [rank{{rank}}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
say = logging.info
total = torch.ones(1)


def step(number):
    dist.all_reduce(total)
    say(f"step {{number}} loss {{2.5 / number:.4f}}")


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={seconds}))
    say(f"start world_size={{world}}")
{lines}

if __name__ == "__main__":
    main()
"""
    return Failure(before + _TORCHRUN.format(ranks=ranks) + " train.py" + after, {"train.py": program})


def _alone(job: Failure, ranks: int, around: str = "sh -c") -> Failure:
    """The same job without a launcher, as under a scheduler that ends nobody when one has failed."""
    ranked = _ALONE.format(ranks=ranks, numbers=" ".join(map(str, range(ranks))))
    return Failure(f"{around} {shlex.quote(ranked)}", job.files)


def _wrapped(job: Failure, how: str = "subprocess.run(command, check=True)") -> Failure:
    """The same, started by a script of the user's that raises when the job fails."""
    launch = f"import subprocess\n\ncommand = {job.command.split()!r}\n\n\ndef main():\n    {how}\n\n\nmain()\n"
    return Failure("python launch.py", {**job.files, "launch.py": launch})


def _hub(status: int, code: str | None, body: str) -> Failure:
    """A model hub on this machine that answers every request alike, and a program that wants a model of it."""
    header = f'self.send_header("X-Error-Code", {code!r})' if code else "pass"
    server = f"""\
import http.server, os, subprocess, sys, threading


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response({status})
        {header}
        self.send_header("X-Request-Id", "Root=1-00000000")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *arguments):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
environment = dict(os.environ, HF_ENDPOINT=f"http://127.0.0.1:{{server.server_port}}", HF_HOME=os.getcwd() + "/cache")
sys.exit(subprocess.run([sys.executable, "train.py"], env=environment).returncode)
"""
    return Failure("python hub.py", {"hub.py": server, "train.py": body})


_DOWNLOAD = """\
from huggingface_hub import snapshot_download, hf_hub_download


def main():
    print("loading the tokenizer")
    hf_hub_download("org/model-7b", "config.json")


main()
"""
_PRETRAINED = """\
from transformers import AutoConfig


def main():
    print("loading the model")
    AutoConfig.from_pretrained("org/model-7b")


main()
"""
_SMALL_SHM = "unshare -m sh -c 'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {command}'"
_OTHER_USER = "chmod -R a+rX . && exec setpriv --reuid={user} --regid={user} --clear-groups "
_FEW_PROCESSES = _OTHER_USER + "bash -c 'ulimit -u {limit}; exec {command}'"
_DUMPS = "faulthandler.dump_traceback_later(4, exit={exits}, file=sys.stderr)\n"


def _plain(program: str, command: str = "python train.py") -> Failure:
    return Failure(command, {"train.py": program})


FAILURES: dict[str, Failure] = {
    # A wrapper's exception is what came of the job's.
    "wrapped-killed": _wrapped(
        _train("step(1)\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nstep(2)", seconds=60)
    ),
    "wrapped-segfault": _wrapped(
        _train("import ctypes\nstep(1)\nif rank == 0:\n    ctypes.string_at(0)\ntime.sleep(60)", seconds=60),
        "subprocess.check_call(command)",
    ),
    "wrapped-exception": _wrapped(
        _train('step(1)\nif rank == 1:\n    raise ValueError("sample 77 has no label")\nstep(2)', seconds=60),
        "subprocess.check_output(command)",
    ),
    "wrapped-full-disk": Failure(
        "unshare -m sh -c 'mkdir out && mount -t tmpfs -o size=64k tmpfs out && exec python launch.py'",
        {
            "train.py": 'import torch\n\n\ndef main():\n    print("step 10 loss 2.5")\n'
            '    torch.save(torch.zeros(100_000), "out/step_10.pt")\n\n\nmain()\n',
            "launch.py": 'import subprocess, sys\n\nsubprocess.run([sys.executable, "train.py"], check=True)\n',
        },
    ),
    # What fails while a failure is told or cleaned up is not the root.
    "logger-has-no-room": Failure(
        "unshare -m sh -c 'mkdir out && mount -t tmpfs -o size=8k tmpfs out && exec python train.py'",
        {
            "train.py": "import logging\n\n"
            'handler = logging.FileHandler("out/train.log")\nlogging.getLogger().addHandler(handler)\n'
            "log = logging.getLogger()\nlog.setLevel(logging.INFO)\n\n\n"
            'def step(batch):\n    return batch["labels"]\n\n\n'
            'def main():\n    for n in range(3):\n        log.info("step %d %s", n, "x" * 5000)\n'
            '    step({"inputs": 1})\n\n\nmain()\n'
        },
    ),
    "cleanup-fails-too": _train(
        'import urllib.request\n\ndef train():\n    raise ValueError("batch of 12 does not divide by 8")\n\n'
        'def report(error):\n    urllib.request.urlopen("http://127.0.0.1:9/report", data=str(error).encode())\n\n'
        "step(1)\ntry:\n    train()\nexcept Exception as error:\n    report(error)\n    raise",
        seconds=60,
    ),
    "peers-gone-while-handling": _train(
        'step(1)\ntry:\n    if rank == 1:\n        raise KeyError("attention_mask")\n    step(2)\n'
        "finally:\n    if rank == 1:\n        dist.barrier()",
        seconds=4,
    ),
    # No room in shared memory is no full disk.
    "semaphores-without-room": _plain(
        "import multiprocessing\n\n\ndef main():\n    queues = [multiprocessing.Queue() for _ in range(400)]\n"
        '    print("made", len(queues))\n\n\nmain()\n',
        _SMALL_SHM.format(size="64k", command="python train.py"),
    ),
    "workers-without-shm": _plain(
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n\n\n"
        "class Big(Dataset):\n    def __len__(self):\n        return 64\n\n"
        "    def __getitem__(self, index):\n        return torch.ones(1_000_000)\n\n\n"
        "def main():\n    for n, batch in enumerate(DataLoader(Big(), batch_size=4, num_workers=2)):\n"
        '        print("step", n, batch.shape)\n\n\nmain()\n',
        _SMALL_SHM.format(size="4m", command="python train.py"),
    ),
    "shared-tensor-without-shm": _plain(
        "import torch\nimport torch.multiprocessing as mp\n\n\ndef main():\n"
        '    mp.set_sharing_strategy("file_system")\n    weights = torch.ones(4_000_000)\n'
        '    weights.share_memory_()\n    print("shared")\n\n\nmain()\n',
        _SMALL_SHM.format(size="1m", command="python train.py"),
    ),
    # A peer that did not come is no broken network.
    "receive-from-nobody": _train(
        "step(1)\nif rank == 0:\n    dist.recv(total, src=1)\nelse:\n    time.sleep(12)", seconds=4
    ),
    "late-by-its-own-clock": _alone(
        _train(
            'step(1)\nbegan = time.monotonic()\ntime.sleep(9 if rank == 2 else 0.1)\n'
            'say(f"tokenized its shard in {time.monotonic() - began:.1f} s")\nstep(2)',
            seconds=4,
        ),
        ranks=3,
    ),
    # Dumps of the stacks tell where everybody was.
    "dump-one-in-open": _train(
        'import pathlib\nstep(1)\nif rank == 1:\n    os.mkfifo("shard-0007.bin")\n'
        + _DUMPS.format(exits=True)
        + 'if rank == 1:\n    pathlib.Path("shard-0007.bin").read_bytes()\nstep(2)',
        ranks=3,
        seconds=60,
    ),
    "dump-all-in-open": _train(
        'import pathlib\nif not rank:\n    os.mkfifo("index.bin")\nstep(1)\n'
        + _DUMPS.format(exits=True)
        + 'pathlib.Path("index.bin").open("rb")\nstep(2)',
        seconds=60,
    ),
    "dump-one-waits-for-itself": _train(
        "import queue\nstep(1)\n"
        + _DUMPS.format(exits=True)
        + "if rank == 0:\n    queue.Queue().get()\nstep(2)",
        ranks=3,
        seconds=60,
    ),
    "dump-one-computes": _train(
        "def evaluate():\n    while True:\n        torch.ones(300, 300) @ torch.ones(300, 300)\n\nstep(1)\n"
        + _DUMPS.format(exits=True)
        + "if rank == 1:\n    evaluate()\nstep(2)",
        seconds=60,
    ),
    "dump-all-in-barrier": _alone(
        _train(
            "step(1)\n"
            + _DUMPS.format(exits=False)
            + 'if rank == 0:\n    time.sleep(0.5)\n    os.system("ip link set lo down")\nelse:\n    time.sleep(1)\n'
            "dist.barrier()",
            seconds=8,
        ),
        ranks=3,
        around="unshare -n sh -c 'ip link set lo up && exec sh -c \"$0\"'",
    ),
    "dump-at-two-places": _train(
        "first, second = dist.new_group([0, 1]), dist.new_group([0, 1])\nstep(1)\n"
        + _DUMPS.format(exits=True)
        + "if rank == 0:\n    dist.barrier(first)\n    dist.all_reduce(total, group=second)\n"
        "else:\n    dist.all_reduce(total, group=second)\n    dist.barrier(first)",
        seconds=60,
    ),
    # A hub that says no says so again.
    "hub-no-token": _hub(401, None, _DOWNLOAD),
    "hub-gated": _hub(403, "GatedRepo", _PRETRAINED),
    "hub-no-such-model": _hub(404, "RepoNotFound", _DOWNLOAD),
    "hub-forbidden": _hub(403, None, _DOWNLOAD),
    "hub-malformed-name": _hub(500, None, _DOWNLOAD.replace("org/model-7b", "/data/models/model-7b/")),
    "hub-down": _hub(503, None, _DOWNLOAD),
    # Nothing but one line, and that is a fault.
    "bad-option": Failure(
        _TORCHRUN.format(ranks=2) + " -m trainer --lerning-rate 1",
        {"trainer.py": "import argparse\n\nparser = argparse.ArgumentParser()\n"
         'parser.add_argument("--learning-rate")\nparser.parse_args()\n'},
    ),
    "bad-option-of-a-module": Failure(
        "python -m trainer --lr x",
        {"trainer.py": "import argparse\n\n"
         'parser = argparse.ArgumentParser(prog="python -m trainer")\n'
         'parser.add_argument("--lr", type=float)\nparser.parse_args()\n'},
    ),
    "no-more-processes": Failure(
        _FEW_PROCESSES.format(user=64321, limit=4, command="bash job.sh"),
        {"job.sh": "for n in 1 2 3 4 5 6; do sleep 5 & done\nls >/dev/null\npython3 train.py\n"},
    ),
    "no-more-workers": _plain(
        "import multiprocessing, time\n\n\ndef main():\n"
        '    print("loading with 8 workers", flush=True)\n'
        "    with multiprocessing.Pool(8) as pool:\n        pool.map(time.sleep, range(8))\n\n\nmain()\n",
        _FEW_PROCESSES.format(user=64322, limit=4, command="/usr/bin/python3 train.py"),
    ),
    # Damaged checkpoints.
    "safetensors-without-metadata": _plain(
        "import torch\nfrom accelerate.utils.modeling import load_state_dict\n"
        "from safetensors.torch import save_file\n\n\n"
        "def resume():\n"
        '    return load_state_dict("step_40/model.safetensors")\n\n\n'
        'import os\n\nos.mkdir("step_40")\n'
        'save_file({"w": torch.ones(9)}, "step_40/model.safetensors", metadata={"by": "hand"})\n'
        "resume()\n"
    ),
    "safetensors-cut-short": _plain(
        "import torch\nfrom safetensors.torch import load_file, save_file\n\n\ndef resume():\n"
        '    return load_file("model.safetensors")\n\n\nsave_file({"w": torch.ones(9999)}, "model.safetensors")\n'
        'open("model.safetensors", "r+b").truncate(5000)\nresume()\n'
    ),
    "checkpoint-cut-short": _plain(
        'import torch\n\n\ndef resume():\n    return torch.load("step_40.pt")\n\n\n'
        'torch.save({"w": torch.ones(9999)}, "step_40.pt")\nopen("step_40.pt", "r+b").truncate(5000)\nresume()\n'
    ),
    # A word of the user's own is no verdict.
    "a-print-and-a-bug": _train(
        'step(1)\nif rank == 0:\n    print("STRAGGLER detected: rank 1 is a straggler, 1.4x slower", flush=True)\n'
        "step(2)\nif rank == 1:\n    [][0]\nstep(3)",
        seconds=60,
    ),
    "a-print-and-no-fault": _train(
        "for n in range(1, 8):\n    step(n)\n    if rank == 0:\n"
        '        print(f"STRAGGLER: rank 1 {n}.2 s", flush=True)\n'
        'dist.destroy_process_group()\nsay("training finished")',
        seconds=60,
    ),
}  # fmt: skip


def make(failure: Failure) -> str:
    """Run a failure and return what it printed, made neutral."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, text in failure.files.items():
            (directory / file).write_text(text)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LANG": "C.UTF-8", "HOME": name, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        job = subprocess.Popen(
            failure.command, shell=True, cwd=directory, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = job.communicate(timeout=_LIMIT_S)
        finally:
            # What a failure leaves behind must not outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        return _neutral(printed.decode("utf-8", "replace"), name)


def _neutral(text: str, directory: str) -> str:
    text = text.replace(os.path.realpath(directory), "/workspace/job").replace(directory, "/workspace/job")
    for pattern, neutral in _NEUTRAL:
        text = pattern.sub(neutral, text)
    return text.replace(socket.getfqdn(), "node-1").replace(socket.gethostname(), "node-1")


def main() -> None:
    """Make the failures named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.labelled.make", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of one failure")
    for name in parser.parse_args().names or FAILURES:
        text = make(FAILURES[name])
        (HERE / f"{name}.txt").write_text(text)
        print(f"{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
