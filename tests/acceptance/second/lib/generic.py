"""How healthy waits and stuck jobs are judged, for all of them alike."""

import os
import re
import signal
import threading
import time

import kit


def marked(case, mark, script="train.py"):
    return [n for n, line in enumerate((case.dir / script).read_text().splitlines(), 1) if f"# {mark}" in line]


def notices(lines):
    """(text, ranks named as the one that is waited for or None for all, lines of the script named in that clause)."""
    found = []
    for text in lines:
        hit = re.search(r"resilience: (no progress for .*)", text)
        if not hit:
            continue
        clause = hit.group(1).split(": ", 1)[-1].split(";")[0]
        places = [int(n) for n in re.findall(r"train\.py:(\d+)", clause)]
        if re.search(r"\ball ranks\b|\bevery rank\b", clause):
            found.append((hit.group(1), None, places))
            continue
        named = set()
        for group in re.findall(r"\branks? ((?:\d+(?:, | and )?)+)", clause):
            named |= {int(n) for n in re.findall(r"\d+", group)}
        found.append((hit.group(1), sorted(named), places))
    return found


def ends(job, word="END"):
    with job.lock:
        text = "\n".join(line for _, line in job.lines)
    return {int(rank) for rank in re.findall(rf"{word} rank=(\d+)", text)}


def argv_of(case, way, ranks):
    if way == "auto":
        case.env["RESILIENCE_RUN_DIR"] = str(case.run_dir)
        return case.torchrun("-m", "resilience_sdk.auto", "train.py", ranks=ranks)
    return case.run(ranks=ranks)


def others(case):
    return [i for i in case.incidents() if i.get("cause") != "abort_at_exit" and i.get("kind") != "slow"]


def healthy(file, wait_s, waiters, ranks=2, way="run", cpu=False, outside=None):
    def story(case):
        case.ranks = ranks
        case.pace(wait=wait_s, **{"step": 0.1})
        job = case.start(*argv_of(case, way, ranks))
        if outside:
            threading.Thread(target=outside, args=(case, job), daemon=True).start()
        code = job.wait_end(wait_s * (4 if cpu else 1) + 200)
        if code is None:
            case.check(False, "an end", f"it still runs; {job.text()[-300:]!r}")
            case.clean()
            job.wait_end(10)
        with job.lock:
            lines = list(job.lines)
        text = "\n".join(line for _, line in lines)
        waits = {}
        for word, rank, t in re.findall(r"(WAIT|WENT ON) rank=(\d+) t=([\d.]+)", text):
            waits.setdefault(int(rank), []).append((word, float(t)))
        lasted = [b[1] - a[1] for w in waits.values() for a, b in zip(w, w[1:]) if (a[0], b[0]) == ("WAIT", "WENT ON")]
        case.figure(f"waited {max(lasted):.0f} s" if lasted else "never waited")
        torch_abort = way == "auto" and "terminate called without an active exception" in text and ends(job) == set(range(ranks))
        case.check(code == 0 or torch_abort, "exit code 0", f"{code}: {job.text()[-300:]!r}")
        case.check(ends(job) == set(range(ranks)), "END of all ranks", f"{sorted(ends(job))}")
        case.check(bool(lasted) and max(lasted) >= 0.8 * wait_s, f"a wait of {wait_s} s (else the case is unsound)", f"{lasted}")
        case.check(not re.search(r"resilience: HANG", text), "no HANG on the screen", "HANG")
        found = others(case)
        case.check(not found, "no incident", ", ".join(f"{i.get('id')} {i.get('cause')}" for i in found))
        attempts = case.outcome().get("attempts")
        attempts = len(attempts) if isinstance(attempts, (list, dict)) else attempts
        case.check(attempts in (1, None), "one attempt", f"{attempts}")
        begin = next((n for n, (_, line) in enumerate(lines) if "WAIT rank=" in line), len(lines))
        end = max((n for n, (_, line) in enumerate(lines) if "WENT ON" in line), default=len(lines))
        said = notices(line for _, line in lines[begin:end])
        right = marked(case, "WAITS")
        for words, named, places in said:
            case.check(named is None or set(named) <= set(waiters), f"notices of rank {waiters} only", f"{named}: {words}")
            case.check(not places or set(places) <= set(right), f"notices of line {right}", f"{places}: {words}")
        case.figure(f"{len(said)} notices")
        if case.wait_gone(5, job.ended_at or time.monotonic()) is None:
            case.check(False, "nothing left behind", f"{[line for _, line in case.alive()][:4]}")

    kit.play(file, story, total=40, limit=wait_s * (4 if cpu else 1) + 290)


def stuck(file, who, limit, ranks=2, way="run", kinds=("hang",)):
    def story(case):
        case.ranks = ranks
        case.pace(step=0.1)
        job = case.start(*argv_of(case, way, ranks))
        case.wait_event("stuck", 120)
        job.wait_line(r"resilience: HANG|resilience: .*hang_rank", limit + 60)
        if way == "auto":
            time.sleep(3)
        else:
            code = job.wait_end(120)
            case.check(code == 0, "exit code 0 after the restart", f"{code}: {job.text()[-300:]!r}")
            case.check(ends(job) == set(range(ranks)), "END of all ranks", f"{sorted(ends(job))}")
        with job.lock:
            text = "\n".join(line for _, line in job.lines)
        since = max(float(t) for t in re.findall(r"STUCK_AT ([\d.]+)", text))
        found = others(case)
        hangs = [i for i in found if i["kind"] == "hang"]
        rest = [i for i in found if i["kind"] != "hang"]
        case.check(len(hangs) == 1, "one hang incident", f"{[i['id'] for i in found]}")
        case.check(not rest, "no other incident", ", ".join(f"{i['id']} {i.get('cause')}" for i in rest))
        if hangs:
            first = hangs[0]
            seconds = first["detected_at"] - since
            case.figure(f"named after {seconds:.0f} s, {first['cause']}")
            case.check(20 <= seconds <= limit, f"a verdict in 20 to {limit} s", f"{seconds:.0f} s")
            culprits = sorted({c["rank"] for c in first["culprits"]})
            case.check(culprits == who, f"culprit {who}", f"{culprits}")
            for culprit in first["culprits"]:
                line = next((int(m.group(1)) for frame in culprit.get("stack") or [] if (m := re.search(r"train\.py:(\d+)", frame))), None)
                case.check(line in marked(case, "STUCK-HERE"), f"line {marked(case, 'STUCK-HERE')}", f"{line} in {culprit.get('stack')}"[:300])
                case.figure(f"rank {culprit['rank']} line {line}")
        if way == "auto":
            case.check(job.code is None, "the job left alone (on_hang report)", f"it ended with {job.code}")
            case.send(signal.SIGTERM, job.pid)
            job.wait_end(60)
            case.clean()
        elif case.wait_gone(5, job.ended_at or time.monotonic()) is None:
            case.check(False, "nothing left behind", f"{[line for _, line in case.alive()][:4]}")

    kit.play(file, story, total=40, limit=limit + 330)
