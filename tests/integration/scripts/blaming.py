"""Two ranks of which one blames its GPU and ends: it prints so and aborts, or raises. `blaming.py HOW`."""

import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    if sys.argv[1] == "raises":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    print(
        "Memory access fault by GPU node-4 (Agent handle: 0x55) on address 0x7f. Reason: Page not present.",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    print("GPU node-4: HW Exception by GPU node-4, reason :GPU Hang", file=sys.stderr, flush=True)
    os.abort()
dist.barrier()
