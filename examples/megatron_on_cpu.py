"""`megatron_train.py` where no GPU is: megatron.core asks for CUDA by name, and gets the CPU. To try it, not to train.

resilience run --nproc-per-node 2 --run-dir runs/letters examples/megatron_on_cpu.py --steps 100
resilience rehearse kill preempt -- examples/megatron_on_cpu.py
"""

import argparse
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with the CPU as its device."""
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        return function(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore")  # Megatron's, of what it would have on a GPU
    torch.set_num_threads(1)
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
    import megatron_train

    with OnCpu():
        megatron_train.main(steps)
