"""The memory that this rank has on its device, published in its page for the monitor."""

from __future__ import annotations

import sys
from typing import Any

from resilience_sdk.recorder import page_layout as at


def is_used() -> bool:
    """Tell whether this process uses a device of CUDA. Any thread; asks no driver."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def publish(words: memoryview) -> None:
    """Write what torch's allocator has handed out on the current device, the most of it, and what the device has.

    On the thread that trains, between two steps: the device that is current is that thread's, and the allocator is
    locked while it waits for the driver, so that another thread that asked would wait for a kernel that does not end,
    with the GIL. It takes some tens of microseconds, and no synchronisation.
    """
    import torch

    device = torch.cuda.current_device()
    stats = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    words[at.W_DEVICE_NOW] = int(stats.get("allocated_bytes.all.current", 0))
    words[at.W_DEVICE_PEAK] = int(stats.get("allocated_bytes.all.peak", 0))
    words[at.W_DEVICE_TOTAL] = int(total)  # last: it says that the others are there
