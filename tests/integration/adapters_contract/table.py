"""The adapters that the contract suite runs, one line each."""

from __future__ import annotations

import attrs


@attrs.frozen
class Adapter:
    """One adapter, with the names of its own."""

    name: str
    """Its script is `scripts/adapter_<name>.py`."""
    module: str
    """What must be importable."""
    package: str
    """What brings it: `pip install <package>`."""
    forward: str = "fwd"
    backward: str = "bwd"
    optimizer: str = "optim"
    data: str = "data"
    """Its names of the sections."""
    saves_in_background: bool = True
    """Whether its framework has a seam for that."""


ADAPTERS = (
    Adapter("pytorch", "torch", "torch"),
    Adapter("lightning", "lightning.pytorch", "lightning torchdata"),
    Adapter("accelerate", "accelerate", "accelerate"),
    Adapter("transformers", "transformers", "transformers accelerate", saves_in_background=False),
    Adapter("megatron", "megatron.core", "megatron-core==0.16.1"),
    Adapter("deepspeed", "deepspeed", "--no-build-isolation deepspeed==0.19.8"),
)
