"""Folders of run directories in every state, for whoever looks at a dashboard: told by journals, held by leases."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from told_fleet import ToldFleetRun

from resilience_sdk.core.journal import Event
from resilience_sdk.core.json_records import to_values
from resilience_sdk.core.lease import LeaseHolder
from resilience_sdk.core.run_directory import RunDirectory

HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "'\"><svg onload=document.title='owned'>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe \u0000\u001b[31m\r\n\r\ndata: x",
    "javascript:alert(1)//",
    "</script><script src=https://evil.example/x.js></script>",
    "a" * 500,
)
CAUSES = (
    ("gpu_memory_error", "hardware"),
    ("user_code_error", "user"),
    ("rank_killed_sigkill", "process"),
    ("link_down", "network"),
)
VERDICTS = ("preempted", "stop", "give_up", "hardware")
STEPS = 400


def fleet(folder: Path, number: int, *, now: float | None = None, seed: int = 7) -> list[Path]:
    """Make that many runs below a folder, the newest of the last days; return their paths."""
    chosen = random.Random(seed)
    now = time.time() if now is None else now
    names = ("llama-8b", "vit-large", "whisper-ft", "moe-16x", "ablation-lr", "gpt2-small", "diffusion-xl")
    made = []
    for index in range(number):
        path = folder / f"{names[index % len(names)]}-{index:03}"
        lasted = chosen.uniform(0.5, 30) * 3600
        began = now - lasted - (0 if index % 17 == 0 else chosen.uniform(0, 20 * 86400))
        _run(path, chosen, began, lasted, running=index % 17 == 0)
        made.append(path)
    return made


def _run(path: Path, chosen: random.Random, began: float, lasted: float, *, running: bool) -> None:
    nodes = [f"node{chosen.randrange(40)}" for _ in range(chosen.choice((1, 2, 4)))]
    run = ToldFleetRun.make(path, list(dict.fromkeys(nodes)), at=began, job=f"job-{path.name}")
    run.start()
    faults = chosen.choice((0, 0, 1, 1, 2, 5))
    step = 0
    for fault in range(faults + 1):
        run.at += min(300.0, lasted / 20)
        for rank in range(len(run.nodes) * run.ranks_per_node):
            run.tell(run.nodes[0], Event.FIRST_BEAT, rank=rank)
        for _ in range(6):
            run.at += lasted / (faults + 1) / 8
            step += chosen.randrange(50, 900)
            run.tell(run.nodes[0], Event.CKPT_COMMIT, step=step, stall_s=2.0, seconds=9.0, bytes=10**10)
        if fault < faults:
            run.fail(chosen.choice(run.nodes), *chosen.choice(CAUSES))
    end = chosen.random()
    if running:
        run.close()
        elsewhere = LeaseHolder(run.job, host="elsewhere", pid=1)  # of which nobody here can prove that it is gone
        (path / "lease.json").write_text(json.dumps(to_values(elsewhere)))
    elif end < 0.15:
        run.close()
    else:
        run.tell(run.nodes[0], Event.ATTEMPT_END, ended_by="ranks")
        verdict = "finished" if end < 0.6 else chosen.choice(VERDICTS)
        run.tell(run.nodes[0], Event.DECISION, verdict=verdict, exit_code=0)
        run.close()
        (path / "outcome.json").write_text(json.dumps({"verdict": verdict, "exit_code": 0, "ended_at": run.at}))
        if verdict == "finished":
            (path / "finished").touch()
    for place in (*path.glob("journal/*"), path / "journal", path / "incidents", path):
        os.utime(place, (run.at, run.at))


def odd(folder: Path) -> dict[str, Path]:
    """Make one run directory of each kind that is not in order; return them by what is wrong."""
    found = {name: folder / name for name in ("empty", "torn", "older", "bare", "no journal files")}
    for path in found.values():
        RunDirectory.create(path)
    (found["torn"] / "journal" / "host-launcher-1.jsonl").write_bytes(
        b'{"event":"run_start","t":1.0,"job":"j","host":"h"}\n\xff\xfe{"event":"inci\n'
        + b'{"event":"attempt_start","t":'
    )
    (found["torn"] / "outcome.json").write_bytes(b'{"verdict": "fin')
    (found["torn"] / "incidents" / "0001-hang").mkdir()
    (found["torn"] / "incidents" / "0001-hang" / "report.json").write_bytes(b"\x00\x01")
    (found["older"] / "journal" / "h-launcher-1.jsonl").write_text(
        '{"v":0,"event":"run_start","t":5}\n{"v":0,"event":"began","t":6,"step":"seven","attempt":"first"}\n'
        '{"v":0,"event":"incident","t":7,"id":["x"],"kind":{"a":1}}\n{"v":0,"event":"incident","t":8,"id":"0001-crash"}\n'
    )
    for name in ("incidents", "checkpoints"):
        (found["bare"] / name / ".gitignore").unlink(missing_ok=True)
        (found["bare"] / name).rmdir()
    return found


def hostile(folder: Path, text: str, number: int) -> Path:
    """Make a run in which every text that a job can choose is this one; so is its name."""
    name = text.replace("/", "\u2215").replace("\0", "")[:80]
    path = folder / f"{number}-{name}"
    run = ToldFleetRun.make(path, [text[:60] or "node"], job=text, script=text, ranks_per_node=2)
    run.at = time.time() - 100
    run.start()
    for rank in range(2):
        run.tell(run.nodes[0], Event.FIRST_BEAT, rank=rank, step=3)
    run.at += 10
    run.report(run.nodes[0], text, text)
    run.tell(
        run.nodes[0], Event.INCIDENT, id=text, kind=text, cause=text, category=text, summary=text, action=text,
        culprits=[text], nodes=[text],
    )  # fmt: skip
    run.tell(run.nodes[0], Event.DEGRADED, what=text, why=text)
    run.tell(run.nodes[0], Event.STALL, text=text, since=text)
    run.tell(run.nodes[0], Event.HEALTH, what=text, ok=False, why=text, check=text, status="failure", cure=text)
    run.close()
    (path / "outcome.json").write_text(json.dumps({"verdict": text, "exit_code": 1, "reason": text, "ended_at": 1e12}))
    return path
