"""A rank without torch that makes about 47 steps of four sections a second, for a given time."""

from __future__ import annotations

import sys
import time

from resilience_sdk import heartbeat, straggler


def main(seconds: float) -> None:
    """Step until the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with heartbeat():
            for name in ("data", "fwd", "bwd", "optim"):
                with straggler.section(name):
                    time.sleep(0.005)
    heartbeat.done()


if __name__ == "__main__":
    main(float(sys.argv[1]))
