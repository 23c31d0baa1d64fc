"""The look at a node that the words of a program have started: is there anything on it that can be measured?

The launcher starts `main` by name, because it is on the same floor. The kernel's log it has read itself by then.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.settings import settings_from_json
from resilience_sdk.health import probes
from resilience_sdk.health.checkup import job_context, read_task, tell
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.runner import run_probes

_SLURM_S = 3.0
_OUT = re.compile(r"\b(?:DOWN|DRAIN|FAIL|FAILING|NOT_RESPONDING)")  # of a node's state, by `scontrol show node`
_STATE = re.compile(r"\bState=(\S+)")
_REASON = re.compile(r"\bReason=([^\n]+)")
_FAULTY = "gpu_hardware_faulty"
_NODE = "node_failure"


def main() -> int:
    """Answer a task with `found` (`cause`, `text` of what leaves this node out) and `seen`, what was looked at."""
    task = read_task()
    env = environ.environment()
    context = job_context(env, settings_from_json(task["settings"]), local_ranks=task["local_ranks"])
    found, seen = judge(run_probes([attrs.evolve(probes.GPU, deadline_s=task["limit_s"])], context))
    state = _scheduler_says(env)
    if state is not None:
        seen = f"{seen}; Slurm: {state}"
        if _OUT.search(state.partition(",")[0]):
            found = [*found, {"cause": _NODE, "text": f"Slurm has this node as {state}"}]
    tell(task, {"found": found, "seen": seen})
    return 0


def judge(findings: Sequence[Finding]) -> tuple[list[dict[str, Any]], str]:
    """Return what leaves the node out among the findings of its GPUs, and in words what was looked at. Pure."""
    failed = [finding for finding in findings if finding.status is Status.FAILED and _is_answer(finding)]
    found = [
        {
            "cause": finding.data.get("cause") or _FAULTY,
            "text": f"{finding.subject or 'NVIDIA driver'}: {finding.check} {finding.evidence}".strip(),
        }
        for finding in failed
    ]
    answering = sorted({f.subject for f in findings if f.check == "answers" and f.status is Status.OK})
    if found:
        return found, "NVML: " + "; ".join(one["text"] for one in found[:3])
    if answering:
        return [], f"NVML: {', '.join(answering[:8])} in order"
    why = next((finding.evidence for finding in findings if finding.evidence), "no answer")
    return [], f"NVML: {why}"


def _is_answer(finding: Finding) -> bool:
    """Tell whether the driver has said it: a look that came to no end may have been short of processor time."""
    return finding.check != "answers" or ("cause" in finding.data and "call" not in finding.data)


def _scheduler_says(env: Mapping[str, str]) -> str | None:
    """Return the state of this node as Slurm has it, with its reason; None where no Slurm can be asked."""
    node, program = env.get("SLURMD_NODENAME"), shutil.which("scontrol")
    if not node or program is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            [program, "show", "node", node], capture_output=True, timeout=_SLURM_S, text=True, errors="replace",
            check=False,
        )  # fmt: skip
        if (state := _STATE.search(asked.stdout)) is not None:
            reason = _REASON.search(asked.stdout)
            return f"{state[1]}, {reason[1].strip()[:200]}" if reason else state[1]
    return None
