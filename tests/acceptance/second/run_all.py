#!/usr/bin/env python3
"""run_all.py [names or their beginnings...] [--jobs N]: the second set, one line per case; logs in out/NAME/.

`resilience` and its Python are those on PATH. Worlds are made under $STOPS_TMP (else $TMPDIR). STOPS_TIMES=2 doubles all limits but the 5 s.
"""

import argparse
import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 760  # each case has its own limit below this
running, guard = set(), threading.Lock()


def one(name):
    out = HERE / "out" / name
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    env = dict(os.environ)
    env.setdefault("STOPS_TMP", os.environ.get("TMPDIR", "/tmp"))
    process = subprocess.Popen([sys.executable, str(HERE / "cases" / name / "case.py")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True)
    with guard:
        running.add(process)
    limit = LIMIT * float(os.environ.get("STOPS_TIMES", "1"))
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # it cleans up and prints its line
        try:
            text, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            text = ""
    with guard:
        running.discard(process)
    verdict = [line for line in text.splitlines() if line.startswith(("PASS ", "FAIL "))]
    line = verdict[-1] if verdict else f"FAIL {name}: the case itself ended with {process.returncode}: {text[-300:]!r}"
    line += f" ({time.monotonic() - began:.0f} s)"
    print(line, flush=True)
    (out / "verdict.txt").write_text(line + "\n")
    return line.startswith("PASS")


def told(number, frame):
    with guard:
        for process in running:
            process.terminate()  # each ends its own job, by its mark, and takes its mounts away
    end = time.monotonic() + 20
    while running and time.monotonic() < end:
        time.sleep(0.2)
    os._exit(128 + number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_intermixed_args()
    if not shutil.which("resilience"):
        sys.exit("no `resilience` on PATH")
    names = sorted(path.parent.name for path in HERE.glob("cases/*/case.py"))
    names = [n for n in names if not options.names or any(n.startswith(given) for given in options.names)]
    if not names:
        sys.exit("no such case")
    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(one, names))
    print(f"{sum(results)} of {len(results)} as expected", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
