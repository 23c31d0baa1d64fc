"""Megatron: loops on `megatron.core`, and the `pretrain()` of Megatron-LM, with no patch of its files.

    from resilience_sdk.adapters import megatron

    handle = megatron.attach(config, optimizer, first_step=iteration)  # a loop of one's own on megatron.core
    pretrain = megatron.around(pretrain)  # Megatron-LM: call it as ever

Nothing of Megatron is imported here: what is used of it is looked for in what the program has imported.
"""

from resilience_sdk.adapters.megatron.attached import Attached, attach
from resilience_sdk.adapters.megatron.checkpoints import checkpointer
from resilience_sdk.adapters.megatron.pretraining import around

__all__ = ["Attached", "around", "attach", "checkpointer"]
