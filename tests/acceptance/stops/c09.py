"""c09 lightning_validation: TERM to the launcher within a validation of Lightning. See expected.md."""

import json
import signal

from kit import HERE, play

TRAIN = (HERE / "train_lightning.py").read_text()


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("val", limit=180, batch=1, rank=0)
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 45, 75)
    n = case.agreed_stop(job, t0)
    case.check(n in case.checkpoints(), f"a whole checkpoint after {n} steps", str(case.checkpoints()))
    case.check(10 <= n <= 13, "a stop behind the validation", str(n))
    case.silent_of(job, t0, r"never calls|does not call|hindered|died|\bcrash|HANG", "a validation of 9 s is not accused")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.pace(val=0.1)
    case.again(limit=200)
    case.check(case.first_step(2) == n, f"the rerun at step {n}", str(case.first_step(2)))
    case.once()
    case.same_end(reference=json.loads((HERE / "refs" / "lightning.json").read_text()), tolerance=1e-6)


play(__file__, story, total=40, limit=420)
