"""What a person can do about a slow rank. Pure."""

from __future__ import annotations

from resilience_sdk.straggler.verdicts import Verdict

_ON_DEVICE = "the GPU there: its clocks, temperature and errors (nvidia-smi -q), and who else uses it"
_IN_IO = "the storage and the network mounts there, and the workers of the data loader"
_ELSEWHERE = "who else uses the processors there, and their clocks and limits (top, cpu.max); with a GPU its clocks too"
_OF_ALL = {
    "comm": "the network, and who else uses it",
    "gpu_comm": "the network, and who else uses it",
    "io": "the storage that all ranks share, and who else uses it",
}
_OF_ALL_ELSE = "what all ranks share, and what has changed in the job since then: data, batch size, code, clocks"
_IO_SECTIONS = ("data", "checkpoint")


def advice(verdict: Verdict, *, stop: bool) -> str:
    """Return what to look at, and how to go on without the slow node; `stop`: the job leaves it out by itself."""
    if not verdict.ranks or verdict.is_global:
        return f"{verdict.who} in {verdict.where}: look at {_of_all(verdict)}"
    look = f"{verdict.who} in {verdict.where}: look at {_what(verdict)}"
    if stop:
        return look
    node = verdict.nodes[0] if len(set(verdict.nodes)) == 1 and verdict.nodes[0] else "the node"
    return (
        f"{look}; to leave {node} out: give resilience run --stop-if-detected, or while the job runs "
        "resilience straggler RUN_DIR --stop-if-detected, and exclude it where you submit (Slurm: sbatch --exclude)"
    )


def _of_all(verdict: Verdict) -> str:
    return _OF_ALL["io"] if verdict.section in _IO_SECTIONS else _OF_ALL.get(verdict.section_kind, _OF_ALL_ELSE)


def _what(verdict: Verdict) -> str:
    if verdict.section_kind == "gpu":
        return _ON_DEVICE
    return _IN_IO if verdict.section_kind == "io" or verdict.section in _IO_SECTIONS else _ELSEWHERE
