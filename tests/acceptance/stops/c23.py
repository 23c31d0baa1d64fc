"""c23 hf_on_save_upload: HF Trainer, rank 0 in another callback's on_save, TERM to rank 1 alone. See expected.md."""

import json
import signal

from kit import HERE, Wrong, play

TRAIN = (HERE / "train_trainer.py").read_text()


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("upload", limit=200, step=10)
    rank = case.rank_pids()
    if 1 not in rank:
        raise Wrong("rank 1 to live", str(rank))
    t0 = case.send(signal.SIGTERM, rank[1])
    case.heard(job, t0)
    case.named(job, t0, "TERM", "rank 1")
    case.over(job, t0, 45, 75)
    n = case.agreed_stop(job, t0)
    case.check((case.dir / "out" / f"checkpoint-{n}" / "trainer_state.json").exists(), f"checkpoint-{n}", str(sorted(p.name for p in (case.dir / "out").glob("checkpoint-*"))))
    case.check(10 <= n <= 13, "a stop soon behind the upload", str(n))
    case.check(bool(case.events("upload_done", launch=1, step=10)), "the upload to become whole", "cut")
    case.silent_of(job, t0, r"never calls|does not call|hindered|died|\bcrash|HANG", "an upload of 6 s is not accused")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.pace(upload=0.1)
    case.again(limit=220)
    case.check(case.first_step(2) == n, f"the rerun at step {n}", str(case.first_step(2)))
    case.once()
    case.same_end(reference=json.loads((HERE / "refs" / "trainer.json").read_text()), tolerance=1e-6)


play(__file__, story, total=30, limit=480)
