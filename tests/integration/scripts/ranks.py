"""A launcher of somebody's own: `ranks.py N torch|slurm|mpi script.py args` starts N ranks and returns the worst.

The second argument says in whose variables the ranks find out who they are. As schedulers do, it ends the others
when one fails.
"""

import os
import subprocess
import sys

STYLES = {
    "torch": {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "{count}"},
    "slurm": {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NTASKS": "{count}",
    },
    "mpi": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "{count}",
    },
}
count, style, command = int(sys.argv[1]), STYLES[sys.argv[2]], [sys.executable, "-u", *sys.argv[3:]]


def start(rank: int) -> subprocess.Popen:
    """Start one rank."""
    told = {name: value.format(rank=rank, count=count) for name, value in style.items()}
    return subprocess.Popen(command, env={**os.environ, **told})


ranks = {rank.pid: rank for rank in map(start, range(count))}
worst = 0
for _ in range(count):
    pid, status = os.wait()
    ranks.pop(pid).returncode = os.waitstatus_to_exitcode(status)
    if status and not worst:
        worst = abs(os.waitstatus_to_exitcode(status))
        for other in ranks.values():
            other.terminate()
sys.exit(worst)
