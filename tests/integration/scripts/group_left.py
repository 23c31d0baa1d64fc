"""Two gloo ranks that train and leave without `destroy_process_group`, while gloo's thread still wants the GIL.

The main thread keeps it to the end, so that the thread comes to it when the interpreter goes down already.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 1))
sys.setswitchinterval(1000)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
