#!/usr/bin/env python3
"""Runs the cases as a user would, compares with expected.json, prints a table and writes results.json.

    run_all.py [healthy|stuck|saves] [names...] [--jobs 6] [--keep] [--out results.json]
    run_all.py --plain --scale 0.02 healthy     # the scripts alone, under torchrun: are they sound?

Needs only the standard library. `resilience` is the one on PATH, with default settings; each case runs in a fresh directory outside of
any source tree. Services outside of the jobs (slow, limited and silent servers, another job's lock and file) are served from here.
"""

import argparse
import concurrent.futures
import fcntl
import glob
import json
import math
import os
import re
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid

HERE = os.path.dirname(os.path.abspath(__file__))


# ---------------------------------------------------------------- the world outside of the jobs
class World(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    seen = {}
    guard = threading.Lock()

    def count(self, key):
        with self.guard:
            self.seen[key] = self.seen.get(key, 0) + 1
            return self.seen[key]

    def handle_error(self, request, client_address):
        pass  # a client that has gone


def hold_lock(path, seconds, ready):
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready.set()
        time.sleep(seconds)


def touch_later(path, seconds):
    time.sleep(seconds)
    if os.path.isdir(os.path.dirname(path)):
        open(path, "w").close()


class Handler(socketserver.StreamRequestHandler):
    def reply(self, status, body=b"ok", **headers):
        lines = [f"HTTP/1.0 {status}", f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.wfile.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def handle(self):
        first = self.rfile.readline().decode("latin-1").split()
        if not first:
            return
        if first[0] == "LICENSE":
            time.sleep(float(first[1]))
            self.wfile.write(b"GRANTED\n")
            self.rfile.readline()  # until the job gives it back
            return
        length = 0
        while (line := self.rfile.readline().strip()):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if length:
            self.rfile.read(length)
        url = urllib.parse.urlsplit(first[1])
        args = dict(urllib.parse.parse_qsl(url.query))
        seconds = max(0.0, float(args.get("s", 0)))
        if url.path in ("/slow", "/upload"):
            time.sleep(seconds)
            self.reply("200 OK")
        elif url.path == "/limited":
            if self.server.count(args["key"]) == 1:
                self.reply("429 Too Many Requests", Retry_After=seconds)
            else:
                self.reply("200 OK")
        elif url.path == "/times":
            over = self.server.count(args["key"]) > int(args["n"])
            self.reply("200 OK" if over else "429 Too Many Requests")
        elif url.path == "/touch":
            threading.Thread(target=touch_later, args=(args["path"], seconds), daemon=True).start()
            self.reply("200 OK")
        elif url.path == "/lock":
            ready = threading.Event()
            threading.Thread(target=hold_lock, args=(args["path"], seconds, ready), daemon=True).start()
            ready.wait()
            self.reply("200 OK")
        elif url.path == "/never":
            threading.Event().wait()
        else:
            self.reply("404 Not Found")


# ---------------------------------------------------------------- processes
def marked(mark):
    """The processes of a case, in whatever session: those whose environment has its mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"WAITS_CASE={mark}".encode() in file.read().split(b"\0"):
                    with open(f"/proc/{pid}/cmdline", "rb") as line:
                        found.append((int(pid), line.read().replace(b"\0", b" ").decode(errors="replace")[:120]))
        except OSError:
            pass
    return found


def sweep(process, mark, grace=3.0):
    """End what is left of a case; returns what was there."""
    until = time.monotonic() + grace
    while time.monotonic() < until and marked(mark):
        time.sleep(0.2)
    left = marked(mark)
    for _ in range(5):
        for pid, _line in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        if not marked(mark):
            break
        time.sleep(0.2)
    return [line for _, line in left]


def environment(world, scale, mark, patience):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENCE_", "TORCHELASTIC_", "PET_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"):
        env.pop(name, None)
    env.update(WORLD=world, WAIT_SCALE=str(scale), WAITS_CASE=mark, WAITS_HOME=HERE, HF_HUB_OFFLINE="1")
    env["PATIENCE"] = str(max(1, math.ceil(patience)))
    return env


def read(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def ask(command, cwd, env):
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=90)
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        return {"error": f"{' '.join(command)}: {error!r:.200}"}


# ---------------------------------------------------------------- judging
def torch_aborts(run, ranks):
    """torch 2.13 with gloo now and then ends a process by SIGABRT while Python shuts down, behind END, also with destroy_process_group
    (seen without the SDK): in plain runs that is not the script's fault."""
    text = run["output"]
    return run["plain"] and "terminate called without an active exception" in text and ends(text) == set(range(ranks))


def incidents(run):
    """Without those that say just that of torch (docs/incidents.md: abort_at_exit), which is true and harmless."""
    return [i for i in run["why"].get("incidents", []) if i.get("cause") != "abort_at_exit"]


def notices(out):
    """(text, ranks named as the one that is waited for) of each notice."""
    found = []
    for text in re.findall(r"resilience: (no progress for .*)", out):
        clause = text.split(": ", 1)[-1].split(";")[0]
        if re.search(r"\ball ranks\b|\bevery rank\b", clause):
            found.append((text, None))
            continue
        named = set()
        for group in re.findall(r"\branks? ((?:\d+(?:, | and )?)+)", clause):
            named |= {int(n) for n in re.findall(r"\d+", group)}
        found.append((text, sorted(named)))
    return found


def ends(out, what="END"):
    return {int(rank) for rank in re.findall(rf"{what} rank=(\d+)", out)}


def judge_healthy(case, spec, run, scale):
    out, wrong = run["output"], []
    waits = {}
    for word, rank, t in re.findall(r"(WAIT|WENT ON) rank=(\d+) t=([\d.]+)", out):
        waits.setdefault(int(rank), []).append((word, float(t)))
    lasted = [
        b[1] - a[1] for marks in waits.values() for a, b in zip(marks, marks[1:]) if (a[0], b[0]) == ("WAIT", "WENT ON")
    ]
    run["waited_s"] = round(max(lasted), 1) if lasted else None
    if run["timed_out"]:
        wrong.append(f"not over after {run['limit_s']:.0f} s")
    elif run["exit"] != 0 and not torch_aborts(run, spec["nproc"]):
        wrong.append(f"exit {run['exit']}")
    if ends(out) != set(range(spec["nproc"])):
        wrong.append(f"END of ranks {sorted(ends(out))} only")
    if not set(spec["waiter"]) <= ends(out, "WENT ON"):
        wrong.append("its wait did not come to its end")
    elif run["waited_s"] is not None and run["waited_s"] < 0.8 * spec["wait_s"] * scale:
        wrong.append(f"waited {run['waited_s']} s only: the case itself is unsound")
    if not run["plain"]:
        if "error" in run["why"]:
            wrong.append(run["why"]["error"])
        hangs = [i["id"] for i in incidents(run) if i["kind"] == "hang"]
        if hangs:
            wrong.append("incidents " + ", ".join(hangs))
        others = [i["id"] for i in incidents(run) if i["kind"] in ("crash", "preemption", "numerics")]
        if others:
            wrong.append("incidents " + ", ".join(others))
        attempts = run["outcome"].get("attempts")
        if isinstance(attempts, (list, dict)):
            attempts = len(attempts)
        run["attempts"] = attempts
        if attempts not in (1, None):
            wrong.append(f"{attempts} attempts")
        if re.search(r"resilience: HANG", out):
            wrong.append("HANG on the screen")
        during = out[out.find("WAIT rank=") :][: max(0, out.rfind("WENT ON") - out.find("WAIT rank="))] if "WAIT rank=" in out else ""
        run["notices"] = notices(during)  # what is said of a slow start is not judged here
        for text, named in run["notices"]:
            if named is not None and not set(named) <= set(spec["waiter"]):
                wrong.append(f"a notice names rank(s) {named}: {text}")
                break
    seen = f"exit {run['exit']}, waited {run['waited_s']} s, {len(run.get('notices', []))} notices"
    return wrong, seen


def lines_marked(script):
    with open(script) as file:
        return [n for n, line in enumerate(file, 1) if "# STUCK-HERE" in line]


def judge_stuck(case, spec, run, script):
    out, wrong = run["output"], []
    times = [float(t) for t in re.findall(r"STUCK_AT ([\d.]+)", out)]
    if not times:
        return [f"it never got stuck (exit {run['exit']})"], "nothing"
    stuck_at = max(times[: len(spec["who"][0])])
    hangs = [i for i in incidents(run) if i["kind"] == "hang"]
    others = [i["id"] for i in incidents(run) if i["kind"] not in ("hang", "slow")]
    if "error" in run["why"]:
        wrong.append(run["why"]["error"])
    if not hangs:
        return wrong + ["no hang was called" + (f"; {others}" if others else "")], f"exit {run['exit']}"
    first = hangs[0]
    seconds = round(first["detected_at"] - stuck_at, 1)
    run["stuck_to_incident_s"] = seconds
    who = sorted({c["rank"] for c in first["culprits"]})
    if who not in spec["who"]:
        wrong.append(f"culprits {who}")
    where = None
    for culprit in first["culprits"]:
        for frame in culprit.get("stack") or []:
            found = re.search(rf"{re.escape(os.path.basename(script))}:(\d+)", frame)
            if found:
                where = int(found.group(1))
                break
        if spec["where"] and where not in lines_marked(script):
            wrong.append(f"rank {culprit['rank']} at line {where}, not {lines_marked(script)}")
    if spec["where"] and not first["culprits"]:
        wrong.append("no line")
    if spec.get("cause") and first["cause"] != spec["cause"]:
        wrong.append(f"cause {first['cause']}")
    if seconds > spec["limit_s"]:
        hard = spec.get("hard_limit_s")
        wrong.append(f"after {seconds} s" + (f", though within {hard} s" if hard and seconds <= hard else ""))
    if seconds < 20:
        wrong.append(f"after {seconds} s: too early for any row of the table")
    if len(hangs) + len(others) > 1:
        wrong.append("incidents " + ", ".join(i["id"] for i in hangs) + " " + " ".join(others))
    if run["timed_out"]:
        wrong.append(f"not over after {run['limit_s']:.0f} s")
    elif run["exit"] != 0:
        wrong.append(f"exit {run['exit']} after the restart")
    if ends(out) != set(range(spec["nproc"])):
        wrong.append(f"END of ranks {sorted(ends(out))} only")
    return wrong, f"rank {who} line {where} after {seconds} s, exit {run['exit']}"


# ---------------------------------------------------------------- running
STARTED = []  # (process, mark), for an end by a signal


def start(command, cwd, env, out):
    with open(out, "wb") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    STARTED.append((process, env["WAITS_CASE"]))
    return process


def interrupted(number, frame):
    """Ctrl-C or SIGTERM to this runner: what runs is ended, mounts of saves are taken away by their traps."""
    running = [(process, mark) for process, mark in STARTED if process.poll() is None]
    for process, _mark in running:
        os.killpg(process.pid, signal.SIGTERM)
    time.sleep(5)
    for process, mark in running:
        sweep(process, mark, 0)
    os._exit(128 + number)


def wait(process, limit):
    try:
        return process.wait(limit), False
    except subprocess.TimeoutExpired:
        return None, True


def run_case(kind, name, spec, options, world):
    mark = uuid.uuid4().hex
    place = tempfile.mkdtemp(prefix=f"waits-{name[:12]}-", dir=options.tmp)
    env = environment(world, options.scale, mark, options.patience)
    out = os.path.join(place, "out.txt")
    run = {"case": name, "kind": kind, "dir": place, "plain": options.plain, "started": time.time()}
    process = None
    try:
        if kind == "saves":
            limit = spec["limit_s"] * options.patience
            process = start(["bash", os.path.join(HERE, "saves", name + ".sh")], place, env, out)
            run["exit"], run["timed_out"] = wait(process, limit)
            run["output"] = read(out)
            verdict = re.findall(rf"^(PASS|FAIL) {name}\b:? ?(.*)$", run["output"], re.M)
            wrong = [] if verdict and verdict[-1][0] == "PASS" else [verdict[-1][1] if verdict else "no verdict"]
            if run["timed_out"]:
                wrong = [f"not over after {limit:.0f} s"] + wrong
                try:  # its trap takes the mounts away
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(10)
                except (OSError, subprocess.TimeoutExpired):
                    pass
            return finish(run, wrong, "PASS" if not wrong else "FAIL", options)
        script = os.path.join(place, name + ".py")
        shutil.copy(os.path.join(HERE, kind, name + ".py"), script)
        workers = ["--nproc-per-node", str(spec["nproc"]), "--standalone", name + ".py"]
        command = [options.torchrun, *workers] if options.plain else ["resilience", "run", *workers]
        run["command"] = " ".join(command)
        if kind == "healthy":
            limit = (spec["wait_s"] * options.scale * (4 if spec.get("cpu") else 1) + 240) * options.patience
        else:
            limit = (spec.get("hard_limit_s", spec["limit_s"]) + 240) * options.patience
        if options.plain and kind == "stuck":
            return run_plain_stuck(run, process, command, place, env, out, spec, mark, options)
        run["limit_s"] = limit
        process = start(command, place, env, out)
        run["exit"], run["timed_out"] = wait(process, limit)
        run["wall_s"] = round(time.time() - run["started"], 1)
        run["output"] = read(out)
        if not options.plain:
            runs = sorted(glob.glob(os.path.join(place, "resilience-runs", "*")), key=os.path.getmtime)
            run["run_dirs"] = runs
            where = [runs[-1]] if runs else []
            run["why"] = ask(["resilience", "why", "--json", *where], place, env)
            run["outcome"] = ask(["resilience", "outcome", "--json", *where], place, env)
        if kind == "healthy":
            wrong, seen = judge_healthy(name, spec, run, options.scale)
        else:
            wrong, seen = judge_stuck(name, spec, run, script)
        return finish(run, wrong, seen, options)
    except Exception as error:  # one case must not end the others
        return finish(run, [f"run_all: {error!r}"], "", options)
    finally:
        if process is not None:
            run["left"] = sweep(process, mark)
            if run["left"] and not run.get("timed_out") and not options.plain:
                run["seen"] = run.get("seen", "") + f"; left behind {len(run['left'])} process(es)"
        if not options.keep and not run.get("wrong"):
            shutil.rmtree(place, ignore_errors=True)


def run_plain_stuck(run, process, command, place, env, out, spec, mark, options):
    """Without the SDK: it gets stuck and stays so for 20 s; started again it goes well."""
    wrong = []
    process = start(command, place, env, out)
    try:
        until = time.monotonic() + 180 * options.patience
        while "STUCK_AT" not in read(out) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.3)
        if "STUCK_AT" not in read(out):
            wrong.append("it never got stuck")
        else:
            run["exit"], still = wait(process, 20)
            if not still:
                wrong.append(f"ended with {run['exit']} instead of being stuck")
            if ends(read(out)):
                wrong.append(f"END of {sorted(ends(read(out)))} though stuck")
    finally:
        sweep(process, mark, 0)
    if not wrong:
        process = start(command, place, env, out + "2")
        try:
            run["exit"], run["timed_out"] = wait(process, 90 * options.patience)
            run["output"] = read(out + "2")
            if (run["exit"] != 0 and not torch_aborts(run, spec["nproc"])) or ends(read(out + "2")) != set(range(spec["nproc"])):
                wrong.append(f"second start: exit {run['exit']}, END of {sorted(ends(read(out + '2')))}")
        finally:
            sweep(process, mark, 0)
    run["output"] = read(out) + "\n--- again\n" + read(out + "2")
    return finish(run, wrong, "stuck, and well when started again" if not wrong else "", options)


def finish(run, wrong, seen, options):
    run["wall_s"] = round(time.time() - run["started"], 1)
    run["wrong"], run["seen"] = wrong, seen
    run["verdict"] = "PASS" if not wrong else "FAIL"
    return run


def expectation(kind, spec):
    if kind == "healthy":
        return f"exit 0, END, 1 attempt, no hang; {spec['wait_s']} s: {spec['kind']}"
    if kind == "stuck":
        return f"hang of {spec['who'][0]}{' at its line' if spec['where'] else ''} in {spec['limit_s']} s: {spec['kind']}"
    return spec["answer"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="healthy, stuck, saves, and names (or their beginnings); all without any")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--out", default="results.json")
    parser.add_argument("--tmp", default=None, help="where the fresh directories are made (default: the system's)")
    parser.add_argument("--keep", action="store_true", help="keep the directories of cases that pass, too")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all time limits of this runner (not of the expected ones)")
    parser.add_argument("--plain", action="store_true", help="without the SDK, under torchrun: healthy and stuck scripts that do not import it")
    parser.add_argument("--torchrun", default="torchrun")
    parser.add_argument("--scale", type=float, default=1.0, help="WAIT_SCALE; the expected answers hold for 1")
    options = parser.parse_intermixed_args()
    with open(os.path.join(HERE, "expected.json")) as file:
        expected = json.load(file)
    kinds = [w for w in options.what if w in ("healthy", "stuck", "saves")] or ["healthy", "stuck", "saves"]
    names = [w for w in options.what if w not in ("healthy", "stuck", "saves")]
    cases = [
        (kind, name, expected[kind][name])
        for kind in kinds
        for name in expected[kind]
        if not names or any(name.startswith(n) for n in names)
    ]
    if options.plain:
        cases = [
            c
            for c in cases
            if c[0] != "saves" and ("resilience_sdk" not in read(os.path.join(HERE, c[0], c[1] + ".py")))
        ]
    elif not shutil.which("resilience"):
        sys.exit("no `resilience` on PATH")
    cases.sort(key=lambda c: -(c[2].get("hard_limit_s") or c[2].get("limit_s") or c[2].get("wait_s")))  # long ones first
    place = options.tmp or tempfile.gettempdir()
    above = os.path.abspath(place)
    while above != "/":
        if os.path.exists(os.path.join(above, ".git")) or os.path.exists(os.path.join(above, "pyproject.toml")):
            sys.exit(f"{place} lies in a source tree ({above}): --tmp")
        above = os.path.dirname(above)
    server = World(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    world = f"127.0.0.1:{server.server_address[1]}"
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_case, *case, options, world) for case in cases]
        for future in concurrent.futures.as_completed(futures):
            run = future.result()
            results.append(run)
            print(f"{run['verdict']} {run['case']} ({run['wall_s']} s) {'; '.join(run['wrong']) or run['seen']}", flush=True)
            with open(options.out, "w") as file:
                json.dump(results, file, indent=1)
    order = {case[1]: number for number, case in enumerate(sorted(cases))}
    results.sort(key=lambda run: order[run["case"]])
    with open(options.out, "w") as file:
        json.dump(results, file, indent=1)
    print(f"\n{'case':<5} {'verdict':<7} {'expected':<100} seen")
    for run in results:
        spec = expected[run["kind"]][run["case"]]
        seen = "; ".join(run["wrong"]) or run["seen"]
        print(f"{run['case'][:3]:<5} {run['verdict']:<7} {expectation(run['kind'], spec)[:100]:<100} {seen}")
    failed = [run["case"] for run in results if run["wrong"]]
    print(f"\n{len(results) - len(failed)} of {len(results)} as expected" + (f"; not: {', '.join(failed)}" if failed else ""))
    for run in results:
        if run["wrong"]:
            print(f"  {run['case']}: {run['dir']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
