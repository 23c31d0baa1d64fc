"""A real Slurm on this machine: controller, two nodes and munge, with folders, ports and a name of their own.

Nothing of the machine's own Slurm is touched or used. The two nodes are two loopback addresses, so that the
names in a node list lead to somewhere, as they do in a cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

PATIENCE_S = 150.0
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 64  # what the nodes claim to have: jobs of several tests run side by side
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CLIENTS = ("sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
# Ended, and nothing is left to be done for it.
_OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"})

_CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
MinJobAge=7200
SlurmdParameters=config_overrides
KillWait=30
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """Return why Slurm cannot be started here, None when it can."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    missing = [name for name in (*_DAEMONS, *_CLIENTS) if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} missing (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmd runs jobs as root only"


@attrs.define
class Cluster:
    """A running cluster; `run` executes its clients."""

    folder: Path
    env: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def run(self, *words: str, check: bool = True, **options: object) -> str:
        """Run a command of Slurm and return what it printed."""
        done = subprocess.run(
            words,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=30,
            **options,  # type: ignore[call-overload]
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return str(done.stdout).strip()

    def submit(self, script: Path, folder: Path, *options: str, env: dict[str, str] | None = None) -> int:
        """Submit a batch script from `folder` and return the number of its job."""
        whole = {**self.env, **(env or {})}
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env=whole, cwd=folder, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` tells, by key."""
        words = self.run("scontrol", "show", "job", "-o", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, happened: Callable[[], bool], what: Callable[[], str], timeout_s: float = PATIENCE_S) -> None:
        """Wait until something happened; fail with what `what` tells otherwise."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, what()
            time.sleep(0.1)

    def wait_over(self, number: int, tell: Callable[[], str], timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """Wait until a job is over for good and return what Slurm says of it."""
        self.wait(lambda: self.job(number)["JobState"] in _OVER, lambda: f"{self.job(number)}\n{tell()}", timeout_s)
        return self.job(number)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        """End all jobs and daemons and remove the folder."""
        with contextlib.suppress(Exception):
            self.run("scancel", "--signal=KILL", "--full", "--user=root", check=False)
            self.run("scancel", "--user=root", check=False)
            self.wait(lambda: not self.run("squeue", "--noheader", check=False), self.logs, 20.0)
        for signal_, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            for daemon in reversed(self.daemons):
                if daemon.poll() is None:
                    daemon.send_signal(signal_)
            for daemon in self.daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(patience_s)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster and take it down again."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: it holds a socket, whose path may have 107 characters
    name = folder.name.removeprefix("slurm-").replace("_", "x")
    ctld_port, *slurmd_ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={node} NodeHostname={host} Port={port} CPUs={CPUS} State=UNKNOWN"
        for node, port in zip(NODES, slurmd_ports, strict=True)
    )
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(name=f"t{name}", host=host, ctld_port=ctld_port, folder=folder, nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o711)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "RESILIENCE"))}
    kept["PATH"] = os.pathsep.join((kept.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"))
    started = Cluster(folder, {**kept, "SLURM_CONF": str(conf)})
    try:
        _start(started, conf)
        yield started
    finally:
        started.close()


def _start(cluster: Cluster, conf: Path) -> None:
    folder = cluster.folder
    commands = [
        [
            "munged", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
        ],
        ["slurmctld", "-D", "-f", str(conf)],
        *(["slurmd", "-D", "-N", node, "-f", str(conf)] for node in NODES),
    ]  # fmt: skip
    for command in commands:
        with (folder / f"{command[0]}.out.log").open("ab") as out:
            cluster.daemons.append(
                subprocess.Popen(command, env=cluster.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )
        if command[0] == "munged":
            cluster.wait((folder / "munge.socket").exists, cluster.logs, 10.0)
    cluster.wait(lambda: _all_idle(cluster), cluster.logs, 40.0)


def _all_idle(cluster: Cluster) -> bool:
    for daemon in cluster.daemons:
        assert daemon.poll() is None, f"{daemon.args} ended\n{cluster.logs()}"
    return cluster.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split() == ["idle"] * len(NODES)


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
