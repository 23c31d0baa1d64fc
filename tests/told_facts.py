"""Facts of a report, told by hand: of 1, 4 and 4,096 ranks, of an empty directory, and with hostile words."""

import math
import random
from itertools import pairwise

import attrs

from resilience_sdk.goodput.buckets import DEFINITIONS, Bucket
from resilience_sdk.goodput.summary import RATIOS
from resilience_sdk.report.facts import (
    AttemptTimes,
    CheckpointFacts,
    CurveFacts,
    FindingFacts,
    Headline,
    HeatMap,
    IncidentFacts,
    Pin,
    RankFacts,
    RunFacts,
    ScoreFacts,
    Segment,
    StackFacts,
    StandstillFacts,
    StragglerFacts,
)

BEGAN = 1_790_000_000.0
LOOP = (
    "/usr/lib/python3.11/threading.py:327 wait",
    "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1448 _get_data",
    "/home/me/train.py:83 fetch",
    "/home/me/train.py:120 main",
    "/home/me/train.py:131 <module>",
)
HOSTILE = (
    "<script>alert(1)</script>",
    "</style></script></title><img src=x onerror=alert(2)>",
    '" onmouseover="alert(3)" x=\'',
    "javascript:alert(4)",
    "\x1b[31mred\x1b[0m \x00 \x07",
    "\u202egpj.exe\u202c \u2066isolated",
    "w" * 600,
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; &amp; <b>bold</b>",
    "--><!-- ]]> <![CDATA[ <svg onload=alert(5)>",
    "https://evil.example/x.png \ud800 \U0001f525",
)


def empty():
    """A directory in which nothing has run."""
    headline = Headline(
        "empty",
        "Nothing has run here yet.",
        next="Start a job that writes here:",
        commands=("resilience run --run-dir runs/exp1 train.py",),
    )
    return RunFacts(run_dir="runs/exp1", name="exp1", at=BEGAN, version="0.0", headline=headline)


def one_rank():
    """A rank that has finished without a fault, and has said nothing of its steps."""
    return told_run(1, nodes=1, faults=0, seconds=95.0)


def four_ranks():
    """A small run as it is seen on a desk: hung, killed, and preempted."""
    return told_run(4, nodes=2, faults=3, seconds=5400.0)


def several_jobs():
    """The same of three jobs that used the directory one after the other, as a scheduler names them."""
    facts = four_ranks()
    named = [
        attrs.evolve(one, job=f"{4711 + number}.{number}-node01.cluster.example:29500", job_number=number, attempt=0)
        for number, one in enumerate(facts.attempts, 1)
    ]
    began_at = named[-1].began_at
    return attrs.evolve(facts, attempts=tuple(named), job=named[-1].job, job_number=len(named), job_started_at=began_at)


def many_ranks():
    """4,096 ranks for three days, with everything that a reader of them could want."""
    return told_run(4096, nodes=512, faults=14, seconds=3 * 86400.0)


def full():
    """As many of everything as a reader of a run directory would hand on, and more."""
    facts = told_run(4096, nodes=512, faults=60, seconds=14 * 86400.0, points=600, columns=160)
    long = "words that a job wrote, some of them about its trouble, others not; " * 40
    stacks = tuple(StackFacts(rank, "node17", LOOP * 8, (False, False, True, True, True) * 8) for rank in range(8))
    evidence = tuple(("log", long) for _ in range(30))
    incidents = tuple(attrs.evolve(one, stacks=stacks, evidence=evidence, paragraph=long) for one in facts.incidents)
    return attrs.evolve(facts, incidents=incidents, events=tuple((BEGAN + i, "degraded", long) for i in range(200)))


def told_run(ranks, *, nodes, faults, seconds, points=240, columns=96):
    """Return the facts of a run of that size; the same each time."""
    dice = random.Random(ranks * 1000 + faults)
    plan = _plan(faults, seconds)
    attempts, segments, incidents, pins = [], [], [], []
    now, step = BEGAN, 0
    for number, (kind, length) in enumerate(plan):
        parts = _parts(number, kind, length, step)
        began, first = now, step
        for bucket, part in parts:
            segments.append(Segment(bucket, now, now + part, None if bucket == "idle" else number))
            now += part
        step += int(length / seconds * 20_000)
        held = ()
        if kind != "finished":
            at = now - (60.0 if kind == "hang" else 0.0) * min(1.0, length / 600)
            one = _incident(len(incidents) + 1, kind, number, at, dice.randrange(ranks), ranks, nodes, step)
            incidents.append(one)
            pins.append(Pin(one.id, at, kind, one.headline, step))
            held = (one.id,)
        buckets = {bucket.value: sum(part for name, part in parts if name == bucket.value) for bucket in Bucket}
        lost = 0 if kind in ("finished", "preemption") else 37
        attempts.append(AttemptTimes("job-1", number, began, now, buckets, first, step, lost, held))
        step -= lost
    totals = {bucket.value: sum(one.buckets[bucket.value] for one in attempts) for bucket in Bucket}
    wall = now - BEGAN
    counted = [one for one in incidents if one.kind in ("crash", "hang")]
    goodput = {
        "wall_s": wall,
        "buckets": totals,
        "definitions": {bucket.value: text for bucket, text in DEFINITIONS.items()} | dict(RATIOS),
        "goodput": totals["productive"] / wall,
        "ettr": (totals["productive"] + totals["data"]) / wall,
        "faults": len(counted),
        "mttf_s": wall / len(counted) if counted else None,
        "mttf_low_s": wall / (3 * len(counted) + 3),
        "mttf_high_s": wall / len(counted) * 4 if counted else None,
        "mttr_s": 84.0 if counted else None,
        "lost_steps": sum(one.lost_steps for one in attempts),
    }
    last = incidents[-1] if incidents else None
    headline = (
        Headline("finished", f"The run finished all {step:,} steps without a fault.")
        if last is None
        else Headline(
            "ended",
            f"The job stopped after {len(counted)} faults; the last: {last.headline}",
            last.paragraph,
            "Find the cause before you run it again; the newest checkpoint is of step 19,800.",
            ("resilience run --run-dir /shared/runs/exp1 --nproc-per-node 2 --nnodes 2 --max-restarts 3 train.py",),
        )
    )
    return RunFacts(
        run_dir="/shared/runs/exp1",
        name="exp1",
        at=now + 30,
        version="0.0",
        headline=headline,
        job="exp1-4711",
        script="train.py",
        world_size=ranks,
        nodes=nodes,
        started_at=BEGAN,
        ended_at=now,
        goodput=goodput,
        segments=tuple(segments),
        attempts=tuple(attempts),
        pins=tuple(pins),
        step_time=(_step_time(segments, points, dice),) if faults else (),
        loss=_loss(segments, points, dice) if faults else (),
        shares=(
            ("fwd", "compute", 0.27, 0.24, 0.31),
            ("bwd", "comm", 0.38, 0.12, 0.46),
            ("data", "data", 0.31, 0.22, 0.58),
            ("optimizer", "compute", 0.03, 0.02, 0.04),
        )
        if faults
        else (),
        why_slow="31% of the step waits for data (section data), on rank 1 58%: more DataLoader workers (num_workers)"
        if faults
        else None,
        throughput="183 k tokens per second on all ranks; 12% of a step does not grow with its work"
        if faults
        else None,
        heat=_heat(ranks, nodes, segments, columns, dice) if ranks > 1 else None,
        stragglers=_stragglers(ranks, now, dice) if ranks > 1 else None,
        checkpoints=_checkpoints(now, dice, 40 if faults else 4),
        hidden_checkpoints=210 if ranks > 1000 else 0,
        findings=_findings(now) if faults else (),
        incidents=tuple(incidents),
        hidden_incidents=7 if faults > 50 else 0,
        standstills=(StandstillFacts("stood-1-0", BEGAN + 30.0, 12.0, "Rank 0 was stopped for 12.0 s.", 0, 1),),
        stood="Rank 0 was stopped for 12.0 s and went on by itself.",
        ranks=tuple(_rank(rank, ranks, nodes) for rank in range(min(ranks, 32))),
        hidden_ranks=max(0, ranks - 32),
        events=tuple(
            (now - 60.0 * i, name, f"{name} in attempt {len(attempts) - 1}")
            for i, name in enumerate(("ended", "decision", "incident", "stall", "checkpoint", "checkpoint", "started"))
        ),
        problems=("torn journal lines skipped: 1",) if faults > 5 else (),
    )


def _plan(faults, seconds):
    kinds = ("preemption", "crash", "hang", "crash", "numerics", "slow")
    if not faults:
        return [("finished", seconds)]
    weights = [1 + (index * 7) % 5 for index in range(faults)]
    return [(kinds[index % len(kinds)], seconds * weight / sum(weights)) for index, weight in enumerate(weights)]


def _parts(number, kind, length, step):
    """Return the buckets of an attempt in the order of time."""
    parts = [("startup" if number == 0 else "restart", 0.05), ("rendezvous", 0.02)]
    if number:
        parts.append(("replayed", 0.04))
    for _ in range(4):
        parts += [("productive", 0.16), ("data", 0.02), ("checkpoint", 0.012)]
    if kind == "hang":
        parts.append(("hang", 0.06))
    if kind == "preemption":
        parts += [("preempted", 0.01), ("idle", 0.09)]
    whole = sum(share for _, share in parts)
    return [(bucket, length * share / whole) for bucket, share in parts]


def _incident(number, kind, attempt, at, rank, ranks, nodes, step):
    node = f"node{rank * nodes // ranks}"
    told = {
        "hang": (
            f"Rank {rank} on {node} made no progress in section data at step {step}: hang_rank_stuck (hang).",
            "hang_rank_stuck",
        ),
        "crash": (
            f"Rank {rank} on {node} raised RuntimeError: CUDA error: an illegal memory access, at step {step}.",
            "cuda_illegal_access",
        ),
        "preemption": (f"All ranks stopped at step {step}, as Slurm asked.", "scheduler"),
        "numerics": (f"Rank {rank} saw a loss of nan at step {step}.", "loss_not_finite"),
        "slow": (f"Rank {rank} on {node} takes 1.8 times as long as the others in section fwd.", "slow_rank"),
    }[kind]
    return IncidentFacts(
        id=f"{number:04d}-{kind}",
        kind=kind,
        attempt=attempt,
        at=at,
        headline=told[0],
        paragraph=f"Rank {rank} has entered 45 collectives of default_pg; the others wait in number 46. "
        "Its thread used no CPU time, did no I/O and did not wake up for 60 s, waiting on a lock.",
        culprits=() if kind == "preemption" else ((rank, node, f"step {step}", "data" if kind == "hang" else "fwd"),),
        victims=f"0-{ranks - 1}" if ranks > 1 else "",
        category=kind,
        cause=told[1],
        meaning="one rank stands still; the others wait for it in a collective",
        action="restart",
        what_to_change="use spawn for the workers of the DataLoader (multiprocessing_context='spawn')"
        if kind == "hang"
        else None,
        confidence=0.4 if kind == "slow" else 0.85,
        latency_s=61.2 if kind == "hang" else 0.4,
        recovered_at=at + 84,
        recovery_s=84.0,
        lost_steps=None if kind == "preemption" else 37,
        stacks=() if kind == "preemption" else (StackFacts(rank, node, LOOP, (False, False, True, True, True)),),
        evidence=(
            ("flight record", "rank 1 has entered 45 collectives of default_pg, the others 46"),
            ("activity", "no CPU time, no I/O and no wake-up for 60 s"),
            ("exit", "died by SIGKILL (ended by the monitor)"),
        ),
        rerun="resilience run --run-dir /shared/runs/exp1 --nproc-per-node 2 --nnodes 2 train.py --lr 3e-4",
        before="The same failure came in 3 of the last 12 runs, first on 2026-08-02 in runs/exp0."
        if kind == "hang"
        else None,
    )


def _training(segments):
    return [part for part in segments if part.bucket in ("productive", "replayed", "data", "checkpoint")]


def _moments(segments, points):
    spread = _training(segments)
    began, ended = spread[0].began_at, spread[-1].ended_at
    for index in range(points):
        at = began + (ended - began) * index / (points - 1)
        yield index, at, any(part.began_at <= at <= part.ended_at for part in spread)


def _step_time(segments, points, dice):
    at, steps, values, low, high = [], [], [], [], []
    for index, moment, trains in _moments(segments, points):
        value = 0.21 + 0.02 * math.sin(index / 9) + dice.random() * 0.03 + (0.09 if index > points * 0.7 else 0)
        value = 14.0 if index == points // 3 else value
        at.append(moment)
        steps.append(index * 80)
        values.append(value if trains else None)
        low.append(value * 0.9 if trains else None)
        high.append(value * (1.15 + dice.random() * 0.3) if trains else None)
    return CurveFacts("median of the ranks", "s", tuple(at), tuple(steps), tuple(values), tuple(low), tuple(high))


def _loss(segments, points, dice):
    at, steps, loss, norm = [], [], [], []
    for index, moment, trains in _moments(segments, points):
        at.append(moment)
        steps.append(index * 80)
        loss.append(2.1 + 8.5 * math.exp(-index / 30) + dice.random() * 0.15 if trains else None)
        norm.append(0.8 + dice.random() * 0.4 if trains else None)
    bad = ((at[points // 2], steps[points // 2], "nan"),)
    return (
        CurveFacts("loss", "", tuple(at), tuple(steps), tuple(loss), not_finite=bad),
        CurveFacts("gradient norm", "", tuple(at), tuple(steps), tuple(norm)),
    )


def _heat(ranks, nodes, segments, columns, dice):
    spread = _training(segments)
    began, ended = spread[0].began_at, spread[-1].ended_at
    times = tuple(began + (ended - began) * index / columns for index in range(columns + 1))
    trains = [any(p.began_at <= (a + b) / 2 <= p.ended_at for p in spread) for a, b in pairwise(times)]
    count = min(ranks, 64)
    rows = tuple((ranks * row // count, ranks * (row + 1) // count - 1) for row in range(count))
    slow_row = 1 if count < 20 else 37

    def ratio(row, column):
        base = 1 + dice.gauss(0.02 if count < 20 else 0.12, 0.04)
        return base + (
            0.85 if row == slow_row and column > 0.6 * columns else 2.2 if row == 2 and column == columns // 3 else 0
        )

    cells = tuple(
        tuple(round(ratio(row, column), 2) if trains[column] else None for column in range(columns))
        for row in range(count)
    )
    slowest = tuple(
        tuple(dice.randint(*rows[row]) if trains[c] else None for c in range(columns)) for row in range(count)
    )
    members = tuple(
        f"node{first * nodes // ranks}" if first * nodes // ranks == last * nodes // ranks else None
        for first, last in rows
    )
    worst = tuple(
        (rows[row][0] + 3 * (ranks > 64), f"node{rows[row][0] * nodes // ranks}", 1.85 - 0.1 * i, cells[row])
        for i, row in enumerate((slow_row, 2 % count, 0)[: min(3, count)])
    )
    return HeatMap(times, rows, cells, slowest, members, worst if ranks > 64 else (), "own")


def _stragglers(ranks, now, dice):
    worst = tuple(
        (rank % ranks, f"node{rank // 8}", 0.55 + 0.04 * i)
        for i, rank in enumerate((1, 2377, 901, 12)[: min(4, ranks)])
    )
    scores = (
        ScoreFacts("relative, fwd", 0.55, 0.97, 1.0, worst),
        ScoreFacts("relative, bwd", 0.91, 0.98, 1.0, ((2, None, 0.91),)),
        ScoreFacts("individual, fwd", 0.78, 0.99, 1.0, ((0, None, 0.78),)),
    )
    verdicts = (
        (
            now - 900,
            "found",
            "rank 1 on node0 is slow: 0.55 in section fwd, 1.8 times the time of the others, for 4 windows",
        ),
        (now - 120, "over", "rank 1 on node0 is as fast as the others again"),
    )
    return StragglerFacts(now - 60, ranks, 0.7, scores, verdicts, hidden_verdicts=3 if ranks > 100 else 0)


def _checkpoints(now, dice, count):
    made = []
    for index in range(count):
        outcome, why = "committed", None
        if count > 10 and index == 11:
            outcome, why = "failed", "OSError: [Errno 28] No space left on device"
        if count > 10 and index == 26:
            outcome, why = "quarantined", "its manifest does not match model.pt"
        seconds = 18 + dice.random() * 9
        at = BEGAN + (now - BEGAN) * (index + 0.7) / count
        made.append(CheckpointFacts(at, 500 * (index + 1), outcome, seconds, 1.2 + dice.random(), 5_345_678_901, why))
    return tuple(made)


def _findings(now):
    return (
        FindingFacts(
            now - 4000,
            "node1",
            "gpu_ecc",
            "failure",
            "GPU 3 has 2 uncorrectable memory errors since its last reset (remapping pending)",
            "drain the node and reset GPU 3: nvidia-smi --gpu-reset -i 3",
            3,
        ),
        FindingFacts(
            now - 300,
            "node0",
            "shm",
            "warning",
            "/dev/shm is 91% full",
            "remove what is left in it of jobs that have ended",
            1,
        ),
    )


def _rank(rank, ranks, nodes):
    sections = ("step", "data") if rank == 1 else ("step", "bwd")
    return RankFacts(
        rank,
        f"node{rank * nodes // ranks}",
        "stepping" if rank != 1 else "exited",
        "step 19812",
        0.3 if rank != 1 else 61.0,
        sections,
    )


class Hostility:
    """Puts a hostile text into every text of facts, each with a number of its own, and remembers them."""

    def __init__(self):
        self.put = []

    def text(self):
        """Return the next text, which no other field has."""
        made = f"[{len(self.put)}] {HOSTILE[len(self.put) % len(HOSTILE)]}"
        self.put.append(made)
        return made

    def of(self, value):
        """Return a value with all of its texts replaced."""
        if isinstance(value, str):
            return self.text()
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if attrs.has(type(value)):
            return type(value)(
                **{field.name: self.of(getattr(value, field.name)) for field in attrs.fields(type(value))}
            )
        return value


def hostile():
    """Facts of four ranks in which every text is hostile, and the texts."""
    hostility = Hostility()
    facts = hostility.of(four_ranks())
    drawn = [attrs.evolve(one, parts={one.bucket: one.ended_at - one.began_at}) for one in facts.segments]
    jobs = [attrs.evolve(one, job_number=number) for number, one in enumerate(facts.attempts, 1)]
    facts = attrs.evolve(facts, segments=tuple(drawn), attempts=tuple(jobs), job_number=len(jobs))
    # Attempts tell of incidents by their ids, and a key of goodput is a name of ours.
    return facts, hostility.put
