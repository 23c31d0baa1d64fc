"""Who is compared: what is installed for it, and how its documentation has a job of two ranks started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from tests.bench import processes

PROGRAMS = Path(__file__).with_name("programs")
RESTARTS = 3
OURS = "resilience_sdk"


@attrs.frozen
class Job:
    """One run: where the programs of the environment are, what strikes, where the run may write."""

    bin: Path
    fault: str
    out: Path

    def script(self, name: str) -> list[str]:
        """Return a program of ours with its arguments."""
        return [str(PROGRAMS / name), self.fault, str(self.out)]


@attrs.frozen
class Command:
    """A process of a job."""

    words: list[str]
    environment: Mapping[str, str] = attrs.field(factory=dict)
    label: str = ""
    """Stands before its lines, where a job has several."""
    serves: bool = False
    """It is ended once the others have ended."""


@attrs.frozen
class System:
    """A peer."""

    name: str
    slug: str
    """Names its environment; two systems may share one."""
    package: str
    """What pip installs behind torch; empty for torch alone, `OURS` for a wheel of this tree."""
    commands: Callable[[Job], list[Command]]
    chosen: str
    """What was set that is no default, and what of its documentation was followed."""


def _torchrun(job: Job) -> list[Command]:
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"]
    return [Command([str(job.bin / "torchrun"), *options, *job.script("plain.py")])]


def _ours(job: Job) -> list[Command]:
    options = [f"--run-dir={job.out / 'run'}", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"]
    return [Command([str(job.bin / "resilience"), "run", *options, *job.script("plain.py")])]


def _nvrx(*more: str) -> Callable[[Job], list[Command]]:
    def commands(job: Job) -> list[Command]:
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={RESTARTS}", *more]
        return [Command([str(job.bin / "ft_launcher"), *options, *job.script("nvrx.py")])]

    return commands


def _torchft(job: Job) -> list[Command]:
    port, *groups = processes.free_ports(3)
    lighthouse = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    served = [str(job.bin / "torchft_lighthouse"), *lighthouse, "--bind", f"[::]:{port}"]
    return [
        Command(served, {"RUST_BACKTRACE": "1"}, "lighthouse: ", serves=True),
        *(
            Command(
                [
                    *(str(job.bin / "torchrun"), f"--master-port={own}", "--nnodes=1", "--nproc-per-node=1"),
                    *(f"--max-restarts={RESTARTS}", "--", *job.script("torchft_loop.py")),
                ],
                {
                    "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
                    "REPLICA_GROUP_ID": str(group),
                    "NUM_REPLICA_GROUPS": "2",
                },
                f"group {group}: ",
            )
            for group, own in enumerate(groups)
        ),
    ]


def _lm_resiliency(job: Job) -> list[Command]:
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"]
    return [Command([str(job.bin / "torchrun"), *options, *job.script("lm.py")])]


def _lm_rendezvous(job: Job) -> list[Command]:
    policy, context = job.out / "worker.toml", job.out / "context" / "context.json"
    policy.write_text("schema_version = 1\ninterval = 10\nenable_checkpoint = true\nenable_detection = true\n")
    (port,) = processes.free_ports(1)
    rendezvous = f"store_type=tcp,read_timeout=120,lm_resiliency_restart_context_path={context}"
    return [
        Command(
            [
                *(str(job.bin / "torchrun"), "--nnodes=1:1", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"),
                *("--rdzv-backend=lm_resiliency", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={job.fault}"),
                *(f"--rdzv-conf={rendezvous},lm_resiliency_worker_config={policy}", *job.script("plain.py")),
            ]
        )
    ]


def _traceml(job: Job) -> list[Command]:
    master, aggregator = processes.free_ports(2)
    script, *arguments = job.script("traceml_loop.py")
    options = ["--nproc-per-node=2", f"--master-port={master}", f"--aggregator-port={aggregator}"]
    logs = f"--logs-dir={job.out / 'logs'}"
    return [Command([str(job.bin / "traceml"), "run", script, *options, logs, "--args", *arguments])]


SYSTEMS = (
    System(OURS, "ours", OURS, _ours, f"an unchanged script under `resilience run`; `--max-restarts={RESTARTS}`"),
    System("torchrun", "torchrun", "", _torchrun, f"an unchanged script; `--max-restarts={RESTARTS}` (default 0)"),
    System(
        "NVRx", "nvrx", "nvidia-resiliency-ext==0.4.1", _nvrx(),
        f"a heartbeat each step under `ft_launcher`; `--max-restarts={RESTARTS}` (default 0); its default time-outs",
    ),
    System(
        "NVRx, time-outs set", "nvrx", "nvidia-resiliency-ext==0.4.1",
        _nvrx("--ft-param-initial_rank_heartbeat_timeout=60", "--ft-param-rank_heartbeat_timeout=10"),
        "the same with time-outs of 60 s to the first heartbeat and 10 s between them: it asks for those of the job",
    ),
    System(
        "torchft", "torchft", "torchft==0.2.0", _torchft,
        "two replica groups of one rank and a lighthouse, as its README; time-outs of its `train_ddp.py`, 5 and 30 s; "
        f"`--max-restarts={RESTARTS}`",
    ),
    System(
        "LM-Resiliency", "lm", "lm-resiliency==0.2.0", _lm_resiliency,
        "`enable_resiliency(model, optimizer, interval=10)` under torchrun, groups of gloo for it, its reports "
        f"printed; `--max-restarts={RESTARTS}`; it asks for three ranks that are alike to convict one, here are two",
    ),
    System(
        "LM-Resiliency, its rendezvous", "lm", "lm-resiliency==0.2.0", _lm_rendezvous,
        "an unchanged script under torchrun with `--rdzv-backend=lm_resiliency` and a policy with checkpoints and "
        f"detection on, as its README; `--max-restarts={RESTARTS}`",
    ),
    System("TraceML", "traceml", "traceml-ai==0.5.0", _traceml, "`init()` and `trace_step()` under `traceml run`"),
)  # fmt: skip
