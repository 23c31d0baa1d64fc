#!/usr/bin/env python3
"""The control: each script alone under plain torchrun, RESILIENCE_DISABLE=1, everything short. One at a time.

    sound.py [names or beginnings...]
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.dont_write_bytecode = True
ONE = {"w08_loader_one_rank", "d09_feeder_one_rank"}
MODULE = {"d02_import_usr1_one_rank": ["-m", "pkg.train"]}


def ended(mark):
    for _ in range(5):
        left = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if int(pid) != os.getpid() and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
                    left += 1
            except OSError:
                pass
        if not left:
            return
        time.sleep(0.2)


def fifo(world):
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if (world / "shards.fifo").exists() and "wait" in ((world / "events.jsonl").read_text() if (world / "events.jsonl").exists() else ""):
            time.sleep(2)
            with open(world / "shards.fifo", "wb") as file:
                file.write(b"data")
            return
        time.sleep(0.1)


def main():
    names = sorted(p.name for p in (HERE.parent / "cases").iterdir())
    for name in names:
        if sys.argv[1:] and not any(name.startswith(g) for g in sys.argv[1:]):
            continue
        began = time.monotonic()
        world = Path(tempfile.mkdtemp(prefix="sound-"))
        shutil.copytree(HERE.parent / "cases" / name, world, dirs_exist_ok=True)
        shutil.copy(HERE / "told.py", world)
        mark = "sound" + uuid.uuid4().hex
        ranks = 1 if name in ONE else 2
        total = 30
        (world / "pace.json").write_text(json.dumps(dict(total=total, step=0.01, eval=0.01, wait=3, save=0.1, host="127.0.0.1", eval_steps=6 if name[0] == "d" else 0, save_steps=10, **{"import": 0.3})))
        server = __import__("socket").create_server(("127.0.0.1", 0))
        pace = json.loads((world / "pace.json").read_text())
        (world / "pace.json").write_text(json.dumps(dict(pace, port=server.getsockname()[1])))
        env = dict(os.environ, SECOND_DIR=str(world), SOUND=mark, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1")
        env["RESILIENCE_RUN_DIR"] = str(world / "run")  # a Checkpointer wants one, also when it is switched off
        if not name.startswith(("w", "k")):
            env["RESILIENCE_DISABLE"] = "1"
        argv = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *MODULE.get(name, ["train.py"])]
        if name.startswith("w09"):
            threading.Thread(target=fifo, args=(world,), daemon=True).start()
        said = ""
        for turn in range(2 if name.startswith("k") else 1):
            with open(world / f"out{turn}", "wb") as out:
                process = subprocess.Popen(argv, cwd=world, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
                try:
                    code = process.wait(25 if name.startswith("k") and turn == 0 else 80)
                except subprocess.TimeoutExpired:
                    code = None
            ended(mark)
            text = (world / f"out{turn}").read_text(errors="replace")
            over = sorted(set(re.findall(r"END rank=(\d)", text)))
            said += f" turn {turn}: code {code}, END {over}, stuck {len(re.findall('STUCK_AT', text))}, waits {len(re.findall('WENT ON', text))};"
        if (world / "final.json").exists():
            done = subprocess.run([sys.executable, "-c", f"import told; told.simulate({total}, {ranks})"], cwd=world, env=env, capture_output=True, text=True)
            want, got = json.loads(done.stdout), json.loads((world / "final.json").read_text())
            said += f" steps {got['steps']}, differs {max(abs(a - b) for a, b in zip(want['weights'], got['weights'])):.1e}"
        good = ("code 0" in said) if not name.startswith("k") else ("turn 0: code None" in said and "turn 1: code 0" in said)
        print("ok " if good else "BAD", name, said, f"({time.monotonic() - began:.0f} s)", flush=True)
        if not good:
            print("    ", (text[:1800] + "\n...\n" + text[-700:]).replace("\n", "\n     "))
        server.close()
        shutil.rmtree(world, ignore_errors=True)


main()
