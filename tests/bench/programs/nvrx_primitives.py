"""Writes, as JSON, the nanoseconds of NVRx's heartbeat and section; runs under its launcher."""

from __future__ import annotations

import json
import sys
import timeit
from pathlib import Path

import nvidia_resiliency_ext.fault_tolerance as fault_tolerance


def main(out: Path, repeats: int, loops: int) -> None:
    """Measure both round trips to the rank monitor."""
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()

    def section() -> None:
        client.start_section("step")
        client.end_section("step")

    result = {}
    for name, call in (("heartbeat", client.send_heartbeat), ("section", section)):
        timeit.timeit(call, number=loops // 10)
        result[name] = [seconds / loops * 1e9 for seconds in timeit.repeat(call, number=loops, repeat=repeats)]
    out.write_text(json.dumps(result))
    client.shutdown_workload_monitoring()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
