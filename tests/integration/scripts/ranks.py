"""A launcher of somebody's own: `ranks.py N script.py args` starts N ranks, waits for them, and returns the worst."""

import os
import subprocess
import sys

count, command = int(sys.argv[1]), [sys.executable, "-u", *sys.argv[2:]]
ranks = [
    subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)})
    for rank in range(count)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
