"""The probes there are, and what they are told about the job. Naming one loads nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Context:
    """What the probes need to know of the job; plain values, handed to their processes as JSON.

    `root` stands before /proc and /sys, so that tests can show a machine that is not theirs. `only` is what one
    probe of a family is to look at (the directory of a storage probe). `environment` holds the variables that the
    job's ranks will have.
    """

    run_dir: str | None = None
    data_dirs: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    rendezvous: str | None = None  # host:port
    local_ranks: int = 1
    root: str = "/"
    only: str = ""
    settings: Mapping[str, Any] = attrs.field(factory=dict)  # Settings.to_json()
    environment: Mapping[str, str] = attrs.field(factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of which `Context(**it)` makes an equal value."""
        return {
            **attrs.asdict(self, recurse=False),
            "settings": dict(self.settings),
            "environment": dict(self.environment),
        }


@attrs.frozen(kw_only=True)
class Probe:
    """One look at one part of the world, in a process of its own.

    `function` names `module:function` below `resilience_sdk.health`; it is called with a `Context` and yields
    `Finding`s, each of which is told at once: what was seen before a hang or a crash counts. It may block and it
    may crash. After `deadline_s` seconds, counted from the start of the process, it is killed and left alone.
    `cure` is what to do when it hangs or crashes, `must` whether that stops a job. `only` becomes `Context.only`.
    """

    name: str
    about: str
    function: str
    deadline_s: float
    cure: str
    must: bool = False
    only: str = ""


GPU = Probe(
    name="gpu",
    about="the GPUs of this node and their driver, through NVML",
    function="gpu.probe:probe",
    deadline_s=15.0,
    cure="look for `NVRM: Xid` in the kernel log; drain the node, reset the GPU or reboot; replace one that hangs again",
    must=True,
)
