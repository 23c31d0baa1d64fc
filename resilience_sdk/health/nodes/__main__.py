"""One node's part in the preflight across nodes, for a launcher: reads its task, tells the verdict.

The task comes on standard input, a JSON object: `host`, `port`, `prefix` (the store of the rendezvous, and a place in
it that belongs to this meeting), `end` (the key of its end), `node`, `names`, `spare`, `holds_store`, `findings` (of
this node's own preflight), `refusal` (see `verdict.Report`) and `answer` (see `answering`). The answer is how the
meeting ended, the same for each node (see `conference`). It takes `LONGEST_S` at most.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from resilience_sdk import environ
from resilience_sdk.health.answering import read_task, tell
from resilience_sdk.health.checkup import compute_probes
from resilience_sdk.health.compute.probe import CPU, built_for_gpus
from resilience_sdk.health.nodes.conference import Conference
from resilience_sdk.health.nodes.pairing import Pair
from resilience_sdk.health.nodes.reduce import part_of, take_part
from resilience_sdk.health.nodes.verdict import Report

LONGEST_S = 600
_STORE_S = 30.0  # for one request


def main() -> int:
    """Take part, and tell what came of it; raises what makes that impossible."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LONGEST_S)
    task = read_task()
    environ.environment().setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a trial that fails is told by us
    import torch
    from torch import distributed

    devices = [probe.only for probe in compute_probes(environ.environment())] if built_for_gpus(torch) else [CPU]
    limit = timedelta(seconds=_STORE_S)
    store = distributed.TCPStore(task["host"], task["port"], is_master=False, wait_for_workers=False, timeout=limit)
    conference = _conference(task, distributed.PrefixStore(task["prefix"], store), devices)
    try:
        end = conference.hold()
    except Exception as error:  # noqa: BLE001 - whatever it was, all must come to the same end
        end = conference.give_up(f"{type(error).__name__}: {' '.join(str(error).split())}")
    tell(task, end)
    os._exit(0)  # torch takes its time to end, and a store that is gone may hold it up


def _conference(task: Mapping[str, Any], store: Any, devices: Sequence[str]) -> Conference:
    node = int(task["node"])

    def try_pair(number: int, pair: Pair, reports: Mapping[int, Report]) -> dict[str, Any]:
        meeting = f"{task['prefix']}/group/{number}/{pair[0]}"
        return take_part(part_of(node, pair, reports, task["host"], task["port"], meeting))

    return Conference(
        store,
        node,
        task["names"],
        {
            "findings": task["findings"],
            "refusal": task["refusal"],
            "devices": devices,
            "holds_store": task["holds_store"],
        },
        spare=int(task["spare"]),
        try_pair=try_pair,
        end=task["end"],
    )


if __name__ == "__main__":
    sys.exit(main())
