"""c01 first_moment: TERM 0.2 s after exec, and TERM at the very first line. See expected.md."""

import signal
import time

from kit import play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
for step in range(work.TOTAL):
    work.train(ddp, optimizer, step)
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    # a: 0.2 s after exec. No event tells this moment, it is the moment.
    first = case.start("resilience", "run", "--nproc-per-node", "2", "--run-dir", str(case.dir / "run-a"), "train.py")
    time.sleep(max(0.0, first.began_at + 0.2 - time.monotonic()))
    printed = bool(first.product_lines())
    t0 = case.send(signal.SIGTERM, first.pid)
    got = case.over(first, t0, 5, (75, -signal.SIGTERM))
    later = [text for _, text in first.lines]
    if got == 75:
        case.heard(first, t0, label="a: word")
    elif got is not None:
        case.check(not printed, "75 with a word once a line was printed", f"{got} after {later[:1]}")
    case.check(not any("Traceback" in text or "KeyboardInterrupt" in text for text in later), "no traceback", str(later[-3:]))
    case.check(not case.events("step"), "no step", str(len(case.events("step"))))

    # b: at the first line
    second = case.start(*case.run())
    second.wait_line(r"resilience:", 60)
    t0 = case.send(signal.SIGTERM, second.pid)
    case.heard(second, t0, label="b: word")
    case.named(second, t0, "TERM")
    case.over(second, t0, 10, 75)
    case.check(not case.steps(0, second.launch), "no step of a job that was stopped at its first line", str(case.steps(0, second.launch)[:3]))
    case.told_steps(second, t0, {0})
    case.silent_of(second, t0, r"[1-9]\d* steps? (?:are |were )?lost|crash|died|restart \d", "no lost steps, no crash, no restart")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.again(second.argv)
    case.check(case.first_step(case.launches) == 0, "the rerun from step 0", str(case.first_step(case.launches)))
    case.once()
    case.same_end()


play(__file__, story, total=20)
