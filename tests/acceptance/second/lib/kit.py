"""What all cases share: a fresh world, a command whose every output line has its time, signals, truth, one line of verdict.

Environment: STOPS_TMP (where worlds are made, /tmp), STOPS_PYTHON (the Python of the product, else from the shebang of `resilience`),
STOPS_KEEP=1 (keep the world; a failed one is always kept), STOPS_TIMES (factor on the limits that are not the 5 s, 1).
"""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent


def clear_signals():
    """As in a login shell, whatever the runner ignores (a background job of a script ignores SIGINT)."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)

SLACK = float(os.environ.get("STOPS_TIMES", "1"))
HEARD = 5.0  # seconds from a signal to the first word about it
STOP_WORD = re.compile(
    r"SIG[A-Z]+\d?|asked to leave|preempt|\bstop(s|ped|ping)?\b|interrupt|\bleav(e|es|ing)\b|terminat|Ctrl-C|hang ?up|hung up|terminal|signal",
    re.I,
)
ACCUSES = (
    r"never calls|does not call|HANG\b|hang_|stands still|stood still|\bstuck\b|\bcrash|died|user_code_error|cause unknown|unknown cause|"
    r"rank_killed|hindered|at fault|culprit|has ended before|ended before the others"
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def python_of_product():
    """Return the Python that has the product."""
    if os.environ.get("STOPS_PYTHON"):
        return os.environ["STOPS_PYTHON"]
    found = shutil.which("resilience")
    if found:
        with open(found, "rb") as file:
            first = file.readline().decode("utf-8", "replace").strip()
        if first.startswith("#!") and "python" in first:
            words = first[2:].split()
            return words[-1] if os.path.basename(words[0]) != "env" else shutil.which(words[-1]) or words[-1]
        beside = Path(found).parent / "python"
        if beside.exists():
            return str(beside)
    return shutil.which("python3") or sys.executable


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Wrong(Exception):
    """The case cannot go on."""

    def __init__(self, expected, saw):
        super().__init__(f"expected {expected}, saw {saw}")
        self.expected, self.saw = expected, saw


class Job:
    """A command that runs, with the time of each line that it printed."""

    def __init__(self, case, argv, launch, tty=False, env=None, session=False):
        self.case, self.argv, self.launch = case, argv, launch
        self.lines, self.lock, self.open_fd = [], threading.Lock(), None
        self.code, self.ended_at = None, None
        full = dict(case.env, STOPS_LAUNCH=str(launch), **(env or {}))
        self.began_at = time.monotonic()
        case.note(f"$ {' '.join(shlex.quote(str(a)) for a in argv)}")
        if tty:
            leader, follower = pty.openpty()

            def own_terminal():
                import fcntl
                import termios

                clear_signals()
                os.setsid()
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

            self.process = subprocess.Popen(
                argv, cwd=case.dir, env=full, stdin=follower, stdout=follower, stderr=follower, preexec_fn=own_terminal, close_fds=True
            )
            os.close(follower)
            source = leader
        else:
            source, write_end = os.pipe()

            def own_group():
                clear_signals()
                os.setsid() if session else os.setpgid(0, 0)

            self.process = subprocess.Popen(
                argv,
                cwd=case.dir,
                env=full,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                preexec_fn=own_group,
                close_fds=True,
            )
            os.close(write_end)
        self.pid = self.process.pid
        self.open_fd = source
        self.hung_up = False
        self.reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        self.reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _read(self, fd):
        rest = b""
        while not self.hung_up:
            if not select.select([fd], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            now = time.monotonic()
            if not data:
                break
            rest += data
            *whole, rest = rest.split(b"\n")
            for line in whole:
                self._add(now, line)
        if rest:
            self._add(time.monotonic(), rest)

    def _add(self, now, raw):
        text = ANSI.sub("", raw.decode("utf-8", "replace"))
        with self.lock:
            self.lines.append((now, text))
        self.case.note(f"[{self.launch} {now - self.case.began_at:8.3f}] {text}")

    def _wait(self):
        self.code = self.process.wait()
        self.ended_at = time.monotonic()
        self.case.note(f"[{self.launch} {self.ended_at - self.case.began_at:8.3f}] ended with {self.code}")

    def hang_up(self):
        """Close the terminal, and return the moment. The reader must have left it first, else the kernel keeps it open."""
        self.hung_up = True
        self.reader.join()
        t0 = time.monotonic()
        os.close(self.open_fd)
        self.case.note(f"[- {t0 - self.case.began_at:8.3f}] terminal closed")
        return t0

    def type(self, data):
        os.write(self.open_fd, data)

    def product_lines(self, since=0.0):
        with self.lock:
            return [(t, text) for t, text in self.lines if t >= since and "resilience:" in text]

    def text(self, since=0.0):
        return "\n".join(text for _, text in self.product_lines(since))

    def wait_line(self, pattern, limit, product=True):
        """Wait until a line matches, and return its time and text."""
        seen, end = re.compile(pattern, re.I), time.monotonic() + limit * SLACK
        while time.monotonic() < end:
            with self.lock:
                for t, text in self.lines:
                    if (not product or "resilience:" in text) and seen.search(text):
                        return t, text
            if self.code is not None:
                break
            time.sleep(0.005)
        how = f"the command ended with {self.code}" if self.code is not None else f"none in {limit:.0f} s"
        raise Wrong(f"a line like /{pattern}/", how)

    def wait_end(self, limit):
        end = time.monotonic() + limit * SLACK
        while time.monotonic() < end:
            if self.code is not None:
                time.sleep(0.15)  # what is still in the pipe
                return self.code
            time.sleep(0.02)
        return None

    def first_word(self, t0, pattern=STOP_WORD):
        for t, text in self.product_lines(t0):
            if (pattern if hasattr(pattern, "search") else re.compile(pattern, re.I)).search(text):
                return t - t0, text
        return None, None


class Case:
    """One case: its world, its findings, its line."""

    def __init__(self, file, total=40, limit=280):
        self.name = Path(file).resolve().parent.name
        self.total = total
        self.began_at = time.monotonic()
        base = os.environ.get("STOPS_TMP") or "/tmp"
        self.dir = Path(tempfile.mkdtemp(prefix=f"second-{self.name}-", dir=base)).resolve()
        self.mark = f"stops-{uuid.uuid4().hex}"
        self.out = TOP / "out" / self.name
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = open(self.out / "log.txt", "w", encoding="utf-8", errors="replace")
        self.mounts, self.ranks = [], 2
        self.log_lock, self.end_lock = threading.Lock(), threading.Lock()
        self.problems, self.figures, self.jobs, self.launches = [], [], [], 0
        self.run_dir = self.dir / "run"
        self.python = python_of_product()
        drop = ("RESILIENCE_", "SLURM_", "PET_", "TORCHELASTIC", "FAULT_TOL", "STOPS_", "TEAMCITY", "PYTEST")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(drop) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
        self.env.update(STOPS_MARK=self.mark, SECOND_DIR=str(self.dir), PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")
        shutil.copy(HERE / "told.py", self.dir / "told.py")
        for path in Path(file).resolve().parent.iterdir():
            if path.name in ("case.py", "__pycache__"):
                continue
            (shutil.copytree if path.is_dir() else shutil.copy)(path, self.dir / path.name)
        self.pace()
        self.limit = limit * SLACK
        threading.Thread(target=self._too_long, daemon=True).start()
        self.note(f"{self.name} in {self.dir}, {time.strftime('%F %T')}, python {self.python}, resilience {shutil.which('resilience')}")

    # ---- the world
    def note(self, text):
        with self.log_lock:
            self.log.write(text + "\n")
            self.log.flush()

    def write(self, name, text):
        (self.dir / name).write_text(text)
        return name

    def pace(self, **values):
        """Say how long things take: step, eval, save, results, import."""
        temporary = self.dir / "pace.json.tmp"
        temporary.write_text(json.dumps(dict({"total": self.total}, **values)))
        os.replace(temporary, self.dir / "pace.json")
        self.note(f"pace {values}")

    def start(self, *argv, **options):
        self.launches += 1
        job = Job(self, [str(a) for a in argv], self.launches, **options)
        self.jobs.append(job)
        return job

    def beside(self, *argv, **options):
        """Start a second launcher of the same launch."""
        job = Job(self, [str(a) for a in argv], self.launches, **options)
        self.jobs.append(job)
        return job

    def run(self, script="train.py", *options, ranks=2):
        return ["resilience", "run", "--nproc-per-node", str(ranks), "--run-dir", str(self.run_dir), *options, script]

    def torchrun(self, *rest, ranks=2):
        return [self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", *rest]

    # ---- what the ranks tell
    def events(self, kind=None, launch=None, **match):
        found = []
        try:
            text = (self.dir / "events.jsonl").read_text()
        except OSError:
            return found
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if kind and event["kind"] != kind or launch and event["launch"] != launch:
                continue
            if all(event.get(k) == v for k, v in match.items()):
                found.append(event)
        return found

    def wait_event(self, kind, limit=120, count=1, job=None, **match):
        job = job or self.jobs[-1]
        end = time.monotonic() + limit * SLACK
        while time.monotonic() < end:
            found = self.events(kind, launch=self.launches, **match)
            if len(found) >= count:
                return found[0]
            if job.code is not None:
                found = self.events(kind, launch=self.launches, **match)
                if len(found) >= count:
                    return found[0]
                raise Wrong(f"the ranks to come to '{kind}' {match or ''}", f"the command ended with {job.code} before: {job.text()[-300:]!r}")
            time.sleep(0.01)
        raise Wrong(f"the ranks to come to '{kind}' {match or ''}", f"nothing in {limit} s")

    def steps(self, rank=0, launch=None):
        return [e["step"] for e in self.events("step", launch=launch, rank=rank)]

    # ---- processes
    def alive(self):
        """Return the processes of this case: by the mark in their environment."""
        found, me, mark = [], os.getpid(), self.mark.encode()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == me:
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X"):
                        continue
                ours = False
                with open(f"/proc/{name}/environ", "rb") as file:
                    ours = mark in file.read()
                if not ours:
                    continue
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    line = file.read()
                if ours:
                    found.append((int(name), line.replace(b"\0", b" ").decode("utf-8", "replace")[:120]))
            except (OSError, IndexError):
                continue
        return found

    def rank_pids(self, launch=None):
        """Return the processes of the ranks of this launch that live, by rank."""
        living = {pid for pid, _ in self.alive()}
        pids = {}
        for event in self.events("up", launch=launch or self.launches):
            if event["host_pid"] in living:
                pids[event["rank"]] = event["host_pid"]
        return pids

    def send(self, number, *pids):
        """Send a signal to processes, and return the moment."""
        t0 = time.monotonic()
        self.note(f"[- {t0 - self.began_at:8.3f}] {signal.Signals(number).name} to {pids}")
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                self.note(f"- {pid} is gone already")
        return t0

    def wait_gone(self, limit, since):
        """Wait until nothing of the case is left; return the seconds since a moment, or None."""
        end = time.monotonic() + limit * SLACK
        while True:
            left = self.alive()
            if not left:
                return time.monotonic() - since
            if time.monotonic() > end:
                self.note(f"- left: {left}")
                return None
            time.sleep(0.1)

    # ---- commands of the product that only read
    def ask(self, command, *options):
        try:
            done = subprocess.run(
                ["resilience", command, str(self.run_dir), *options], cwd=self.dir, env=dict(self.env, STOPS_MARK="asking"), capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{error}"
        self.note(f"$ resilience {command} {' '.join(options)} -> {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-1000:]}")
        return done.returncode, done.stdout

    def outcome(self):
        code, text = self.ask("outcome", "--json")
        try:
            found = json.loads(text)
            return found if isinstance(found, dict) else {}
        except ValueError:
            return {"asked": code}

    def incidents(self):
        _, text = self.ask("why", "--json")
        try:
            return json.loads(text)["incidents"]
        except (ValueError, KeyError, TypeError):
            return []

    def state(self):
        _, text = self.ask("status", "--json")
        try:
            return json.loads(text)
        except ValueError:
            return {}

    def checkpoints(self):
        """Return the whole checkpoints of the run directory, oldest first."""
        found = []
        for path in self.run_dir.glob("checkpoints/step-*/manifest.json"):
            number = re.search(r"step-(\d+)$", str(path.parent))
            if number:
                found.append(int(number.group(1)))
        return sorted(found)

    # ---- findings
    def check(self, good, expected, saw):
        if not good:
            self.problems.append((expected, saw))
            self.note(f"- WRONG: expected {expected}, saw {saw}")
        return bool(good)

    def figure(self, text):
        self.figures.append(text)

    def heard(self, job, t0, pattern=STOP_WORD, what="a word about the stop", limit=HEARD, label="word"):
        while True:
            ended = job.code is not None and time.monotonic() > job.ended_at + 0.5
            after, text = job.first_word(t0, pattern)
            if after is not None or ended or time.monotonic() > t0 + limit + 3:
                break
            time.sleep(0.02)
        self.figure(f"{label} {'never' if after is None else f'{after:.1f} s'}")
        self.check(after is not None, f"{what} on the screen in {limit:.0f} s", f"none; product said {job.text(t0)[:300]!r}")
        if after is not None:
            self.check(after <= limit, f"{what} in {limit:.0f} s", f"after {after:.1f} s: {text!r}")
        return text or ""

    def named(self, job, t0, *words, limit=HEARD):
        """Check that the words stand on the screen, each within the limit after the signal or by the end."""
        end = max(t0 + limit, time.monotonic() + 1)
        while not all(word in job.text(t0) for word in words):
            if time.monotonic() > end or job.code is not None and time.monotonic() > job.ended_at + 0.5:
                break
            time.sleep(0.02)
        missing = [word for word in words if word not in job.text(t0)]
        return self.check(not missing, f"{' and '.join(words)} named on the screen", f"{job.text(t0)[:300]!r}")

    def over(self, job, t0, limit, code, gone=3.0):
        """Check the end of a command: its time, its code, and that nothing is left."""
        got = job.wait_end(max(0.1, limit - (time.monotonic() - t0)) + 20)
        if got is None:
            self.check(False, f"an end within {limit:.0f} s", f"it still runs: {[line for _, line in self.alive()][:6]}")
            self.clean()
            job.wait_end(5)
            return None
        took = job.ended_at - t0
        self.figure(f"end {took:.1f} s")
        self.check(took <= limit * SLACK, f"an end within {limit:.0f} s", f"{took:.1f} s")
        codes = code if isinstance(code, (tuple, list, set)) else (code,)
        self.check(got in codes, f"exit code {' or '.join(map(str, codes))}", f"{got}")
        self.figure(f"code {got}")
        left = self.wait_gone(gone, t0)
        self.check(left is not None, f"nothing left {gone:.0f} s after the end", f"{[line for _, line in self.alive()][:6]}")
        if left is not None:
            self.figure(f"gone {left:.1f} s")
        else:
            self.clean()
        self.check("Traceback" not in self.own_trace(job), "no traceback of the product", self.own_trace(job)[-300:])
        return got

    def own_trace(self, job):
        """Return tracebacks that are the product's: those with only its own files, and none of the script."""
        with job.lock:
            text = "\n".join(text for _, text in job.lines)
        found = ""
        for part in re.split(r"(?=Traceback \(most recent call last\))", text)[1:]:
            body = part[:4000]
            if re.search(r'File "[^"]*resilience_sdk/', body) and str(self.dir) not in body:
                found += body[:600]
        return found

    def silent_of(self, job, t0, pattern, why):
        """Check that no product line since a moment matches."""
        bad = [text for _, text in job.product_lines(t0) if re.search(pattern, text)]
        self.check(not bad, why, repr(bad[0][:240]) if bad else "")

    def told_steps(self, job, t0, allowed, since_all=False):
        """Check each 'after N steps' that the product said."""
        for _, text in job.product_lines(t0):
            for number in re.findall(r"after (\d[\d,]*) (?:steps?|complete)", text):
                number = int(number.replace(",", ""))
                self.check(number in allowed, f"'after N steps' with N in {sorted(allowed)}", repr(text[:200]))

    def agree(self, verdicts, code):
        """Check that the outcome says one of the verdicts, with the code."""
        found = self.outcome()
        self.check(found.get("verdict") in verdicts, f"outcome {' or '.join(verdicts)}", f"{found.get('verdict')} ({found})"[:200])
        codes = code if isinstance(code, (tuple, list, set)) else (code,)
        self.check(found.get("exit_code") in codes, f"outcome's code {codes}", f"{found.get('exit_code')}")
        return found

    def only_incidents(self, kinds, no_culprits=True):
        for one in self.incidents():
            if one.get("kind") == "slow" or one.get("cause") in ("abort_at_exit", "user_interrupt"):
                continue  # documented, and nobody's fault
            self.check(one.get("kind") in kinds, f"no incident but {kinds}", f"{one.get('id')} {one.get('cause')}: {str(one.get('culprits'))[:120]}")
            if no_culprits and one.get("kind") == "preemption":
                self.check(not one.get("culprits"), "nobody accused by the incident", f"{one.get('id')} culprits {str(one.get('culprits'))[:160]}")

    def agreed_stop(self, job, t0, journal=True):
        """Check an agreed stop by the ranks' own log, and return its step."""
        if journal:
            text = "".join(path.read_text(errors="replace") for path in self.run_dir.glob("journal/*.jsonl"))
            self.check("preempt_notice" in text and "stop_agreed" in text, "preempt_notice and stop_agreed in the journal", f"{'preempt_notice' in text} and {'stop_agreed' in text}")
        zero, one = self.steps(0, job.launch), self.steps(1, job.launch)
        self.check(zero == one, "both ranks to stop behind the same step", f"{zero[-3:]} and {one[-3:]}")
        n = (zero[-1] + 1) if zero else 0
        self.told_steps(job, t0, {n} | set(self.checkpoints()))
        self.silent_of(job, t0, r"[1-9]\d* steps? (?:are |were |is )?(?:lost|to be repeated)|lost [1-9]", "no lost steps said, for none is lost")
        self.figure(f"stop after {n}")
        return n

    def once(self, total=None, ranks=(0, 1)):
        """Check that each step was made exactly once over all launches."""
        for rank in ranks:
            made = self.steps(rank)
            wanted = list(range(total or self.total))
            self.check(sorted(made) == wanted, f"each of {len(wanted)} steps once on rank {rank}", f"{len(made)} steps, twice {sorted({s for s in made if made.count(s) > 1})[:5]}, missing {sorted(set(wanted) - set(made))[:5]}")

    def same_end(self, file="final.json", reference=None, tolerance=1e-9):
        """Check number of steps and weights of the end."""
        try:
            final = json.loads((self.dir / file).read_text())
        except (OSError, ValueError) as error:
            return self.check(False, "the results of a finished training", f"{error}")
        if reference is None:
            reference = self.reference()
        self.check(final["steps"] == reference["steps"], f"{reference['steps']} steps in the end", f"{final['steps']}")
        worst = max(abs(a - b) for a, b in zip(final["weights"], reference["weights"]))
        same = len(final["weights"]) == len(reference["weights"])
        self.figure("same bits" if worst == 0 else f"weights differ by {worst:.1e}")
        return self.check(same and worst <= tolerance, f"the weights of the undisturbed training ({tolerance:g})", f"a difference of {worst:.3g}")

    def reference(self):
        """Compute the end of the undisturbed training, in one process and without the product."""
        code = f"import told; told.simulate({self.total}, {self.ranks})"
        done = subprocess.run([self.python, "-c", code], cwd=self.dir, env=dict(self.env, STOPS_MARK="reference"), capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise Wrong("the reference to be computed", done.stderr[-300:])
        return json.loads(done.stdout)

    def again(self, argv=None, limit=150, code=0, job=None, **options):
        """Run the same command once more, to its end."""
        job = self.start(*(argv or self.jobs[0].argv), **options)
        got = job.wait_end(limit)
        if got is None:
            self.check(False, f"the rerun to end within {limit} s", f"it still runs; said {job.text()[-300:]!r}")
            self.clean()
        else:
            self.figure(f"rerun {got} in {job.ended_at - job.began_at:.0f} s")
            self.check(got == code, f"the rerun to end with {code}", f"{got}: {job.text()[-400:]!r}")
            if self.wait_gone(5, job.ended_at) is None:
                self.check(False, "nothing left after the rerun", f"{[line for _, line in self.alive()][:4]}")
                self.clean()
        return job

    def first_step(self, launch):
        made = self.steps(0, launch)
        return made[0] if made else None

    # ---- the end
    def clean(self):
        """Kill what is left of this case, by process id."""
        for _ in range(5):
            left = self.alive()
            if not left:
                return
            for pid, _line in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.3)

    def keep(self):
        """Copy what tells of the case: events, scripts, the run directory without weights."""
        try:
            for path in self.dir.iterdir():
                if path.is_file() and path.stat().st_size < 1 << 20:
                    shutil.copy(path, self.out / path.name)
            for run in [self.run_dir, *self.dir.glob("resilience-runs/*")]:
                if run.is_dir():
                    shutil.copytree(run, self.out / run.name, dirs_exist_ok=True, symlinks=True, ignore=lambda d, names: [n for n in names if n.endswith((".pt", ".ckpt", ".safetensors", ".bin", ".pth")) or n == "ballast"])
        except (OSError, shutil.Error) as error:
            self.note(f"- not all was kept: {error!s:.300}")

    # ---- what the second set needs beside
    def tmpfs(self, place, options):
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
        if done.returncode:
            raise Wrong("a tmpfs for the case (root)", done.stderr)
        self.mounts.append(place)

    def fill(self, place):
        """Fill a file system to its last byte."""
        with open(place / "ballast", "ab", buffering=0) as file:
            for size in (1 << 16, 4096, 512, 1):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    pass
        free = os.statvfs(place).f_bavail
        self.note(f"- {place} filled, {free} blocks free")

    def touch(self, name):
        (self.dir / name).touch()

    def true_losses(self, job, t0, allowed):
        """Check each number of lost steps that the product said."""
        for _, text in job.product_lines(t0):
            for number in re.findall(r"(\d[\d,]*) steps? (?:are |were |is |was )?(?:lost|to be repeated)", text):
                self.check(int(number.replace(",", "")) in allowed, f"lost steps in {sorted(allowed)} or none named", repr(text[:200]))

    def journal(self):
        found = []
        for path in sorted(self.run_dir.glob("journal/*.jsonl")):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    pass
        return found

    def made(self, launch, rank=0):
        return self.steps(rank, launch)

    def goes_on_at(self, launch, step, rank=0):
        made = self.steps(rank, launch)
        self.check(bool(made) and made[0] == step, f"the rerun to begin with step {step}", f"{made[:3]}")

    def _too_long(self):
        time.sleep(self.limit)
        self.problems.append((f"the case to end in {self.limit:.0f} s", "it was ended"))
        self.finish()

    def finish(self):
        if not self.end_lock.acquire(blocking=False):
            time.sleep(60)  # somebody else prints the line, and ends the process
            return
        journal = sorted(self.run_dir.glob("journal/*.jsonl"))
        for path in journal[:8]:
            try:
                self.note(f"--- {path.name}\n{path.read_text(errors='replace')[-12000:]}")
            except OSError:
                pass
        self.clean()
        self.keep()
        for path in reversed(self.mounts):
            subprocess.run(["umount", "-l", str(path)], capture_output=True)
        figures = ", ".join(self.figures)
        if self.problems:
            expected, saw = self.problems[0]
            more = f" (and {len(self.problems) - 1} more: {'; '.join(e for e, _ in self.problems[1:4])})" if len(self.problems) > 1 else ""
            line = f"FAIL {self.name}: expected {expected}, saw {saw}{more} [{figures}] world {self.dir}"
        else:
            line = f"PASS {self.name}: {figures}"
        line = " ".join(line.split())
        self.note(line)
        sys.stdout.write(line[:900] + "\n")
        sys.stdout.flush()
        if not self.problems and not os.environ.get("STOPS_KEEP"):
            shutil.rmtree(self.dir, ignore_errors=True)
        self.log.close()
        os._exit(1 if self.problems else 0)


def play(file, story, **options):
    """Run a case to its one line."""
    if os.environ.get("STOPS_IMPORT"):
        return None  # plain_check.py only wants the training script
    case = Case(file, **options)

    def told(number, frame):
        case.problems.insert(0, ("the case to run to its end", f"signal {number} to the case itself"))
        case.finish()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    try:
        story(case)
    except Wrong as wrong:
        case.problems.append((wrong.expected, wrong.saw))
        case.note(traceback.format_exc())
    except BaseException as error:  # noqa: BLE001 - the line must be printed
        case.problems.append(("the case itself to work", f"{type(error).__name__}: {error}"))
        case.note(traceback.format_exc())
    case.finish()
