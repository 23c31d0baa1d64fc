import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal
import socket
import time

import kit


def story(case):
    case.pace()
    job = case.start(*case.run())
    case.wait_event("step", step=2)
    t, text = case.jobs[-1].wait_line(r"wait|tried again|try again|retr|resolve", 90)
    case.figure(f"waits: {text.strip()[:90]}")
    time.sleep(3)
    if job.code is not None:
        raise kit.Wrong("the launcher to wait for the name", f"it ended with {job.code}: {job.text()[-300:]!r}")
    ups = len(case.events("up"))
    t0 = case.send(signal.SIGUSR2, job.pid)
    case.heard(job, t0)
    case.over(job, t0, 10, 75)
    case.agree({"preempted"}, 75)
    case.check(len(case.events("up")) == ups, "no further attempt", f"{len(case.events('up')) - ups} ranks more")
    case.silent_of(job, 0, r"restart [12] of 3", "no restart counted for a name that does not resolve") if ups == 2 else None
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        case.pace(host="127.0.0.1", port=server.getsockname()[1], step=0.02)
        case.again()
    case.same_end()


kit.play(__file__, story)
