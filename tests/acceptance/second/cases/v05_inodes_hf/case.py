import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import time

import kit


def story(case):
    disk = case.dir / "disk"
    case.tmpfs(disk, "size=64m,nr_inodes=120,mode=0700")
    case.total = 30
    values = dict(total=30, eval_steps=0, save_steps=10, output_dir=str(disk / "output"))
    case.pace(step=0.25, **values)
    job = case.start(*case.run())
    case.wait_event("step", 150, step=12)
    case.check((disk / "output" / "checkpoint-10").is_dir(), "checkpoint-10", "none")
    t0 = time.monotonic()
    number = 0
    try:
        while True:
            (disk / f"cache-{number}").touch()
            number += 1
    except OSError as error:
        case.note(f"- {number} files: {error}")
    case.wait_event("step", 120, step=29)
    done = time.monotonic()
    time.sleep(10)
    case.check(job.code is None, "the last save to be waited for", f"ended with {job.code}: {job.text(t0)[-400:]!r}")
    said = job.text(t0)
    case.check("No space" in said or "inode" in said, "the error to be said", repr(said[:400]))
    case.check(str(disk) in job.text(done), "the path to be named by the wait", repr(job.text(done)[:300]))
    for path in disk.glob("cache-*"):
        path.unlink()
    case.note("- inodes again")
    code = job.wait_end(330)
    case.check(code == 0, "exit code 0", f"{code}: {job.text(t0)[-300:]!r}")
    case.figure(f"code {code}")
    case.agree({"finished"}, 0)
    kept = sorted(p.name for p in (disk / "output").glob("checkpoint-*"))
    case.check("checkpoint-30" in kept and "checkpoint-20" not in kept, "checkpoint-30 and no half checkpoint-20", f"{kept}")
    case.same_end()
    import subprocess

    code = f"import json,sys; from safetensors.torch import load_file; print(len(load_file({str(disk / 'output' / 'checkpoint-30' / 'model.safetensors')!r})))"
    loaded = subprocess.run([case.python, "-c", code], capture_output=True, text=True, env=dict(case.env, STOPS_MARK="asking"), timeout=60)
    case.check(loaded.returncode == 0, "checkpoint-30 to load", loaded.stderr[-300:])
    case.again()
    case.check(not case.steps(0, 2), "the rerun to make no step", f"{case.steps(0, 2)[:3]}")


kit.play(__file__, story, limit=600)
