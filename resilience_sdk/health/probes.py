"""The probes there are, and what they are told about the job. Naming one loads nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs


def _as_tuple(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(texts)


@attrs.frozen(kw_only=True)
class Context:
    """What the probes need to know of the job; plain values, handed to their processes as JSON.

    `root` stands before /proc and /sys, so that tests can show a machine that is not theirs. `only` is what one
    probe of a family is to look at (the directory of a storage probe). `environment` holds the variables that the
    job's ranks will have.
    """

    run_dir: str | None = None
    data_dirs: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    rendezvous: str | None = None  # host:port
    local_ranks: int = 1
    nodes: int | None = None  # of the job, where a launcher knows; else its variables are asked
    root: str = "/"
    only: str = ""
    deadline_s: float = 60.0  # what the probe that reads this has left; set in its process
    listen_s: float = 0.2  # how long a probe may wait for events
    log_newer_s: float | None = None  # only what the kernel has said in these last seconds; else all that it has
    own_pids: tuple[int, ...] = ()  # the job's own processes
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
    cure="look for `NVRM: Xid` in the kernel log; drain the node, reset the GPU or reboot; replace it if it hangs on",
    must=True,
)

GPU_EVENTS = Probe(
    name="gpu",
    about="Xid events, as long as a watch has nothing else to do",
    function="gpu.probe:listen",
    deadline_s=15.0,
    cure=GPU.cure,
    must=True,
)

HOST = Probe(
    name="host",
    about="memory, limits, processors and clock of this machine",
    function="host.probe:host",
    deadline_s=3.5,
    cure="the kernel's own tables do not answer: reboot the node, or leave it out",
)
KERNEL = Probe(
    name="kernel",
    about="faults of hardware and storage in the kernel's log",
    function="host.probe:kernel",
    deadline_s=3.5,
    cure="read it by hand: `dmesg -T | tail -50`",
)
PROCESSES = Probe(
    name="processes",
    about="what earlier jobs left behind",
    function="host.probe:processes",
    deadline_s=3.5,
    cure="a process that cannot even be looked at is stuck in the kernel: `ps axo pid,stat,wchan,args | grep ' D'`",
)
NETWORK = Probe(
    name="network",
    about="fabric ports and network interfaces",
    function="network.probe:devices",
    deadline_s=3.5,
    cure="the driver of a network device hangs: see `dmesg -T`, drain and reboot the node",
    must=True,
)
RENDEZVOUS = Probe(
    name="rendezvous",
    about="names, and the way to the rendezvous",
    function="network.probe:names",
    deadline_s=3.5,
    cure="no name server answers: correct /etc/resolv.conf, or name the rendezvous by its address",
    must=True,
)
STORAGE = Probe(
    name="storage",
    about="the run directory and the data: room, rights, latency",
    function="storage.probe:probe",
    deadline_s=3.5,
    cure="the mount or its server hangs, or it is a pipe without a writer (`stat` and `findmnt -T` with a timeout, "
    "`dmesg -T`): mount it again, name another path, or leave this node out",
    must=True,
)
SOFTWARE = Probe(
    name="software",
    about="versions, settings, variables and the order of timeouts",
    function="software.probe:probe",
    deadline_s=3.5,
    cure="the file system that Python's packages are on hangs (`python -c 'import torch'` would too): mount it again",
    must=True,
)
COMPUTE = Probe(
    name="compute",
    about="whether a device computes right, and how fast; imports torch, so only where it was asked for",
    function="compute.probe:probe",
    deadline_s=60.0,
    cure="the device does not answer: see `dmesg -T`, reset it or reboot the node; leave it out if it hangs again",
    must=True,
)
