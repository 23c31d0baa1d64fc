"""megatron-core on CPU, for tests alone: what asks for CUDA gets the CPU, what waits for a device does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with another device."""
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def install() -> None:
    """Put it in place, for the rest of the process; before the first use of megatron.core."""
    CudaIsCpu().__enter__()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = module.manual_seed = module.manual_seed_all = lambda *_, **__: None
