"""A script that meets at a port of its own choice, which the first argument names."""

import os
import sys

import torch.distributed as dist

env = os.environ
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"])
)
