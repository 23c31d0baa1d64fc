"""A loop on megatron.core that learns to spell: one line watches it, one object saves it.

resilience run --nproc-per-node 2 --run-dir runs/letters examples/megatron_train.py     # on GPUs
resilience run --nproc-per-node 2 --run-dir runs/letters examples/megatron_on_cpu.py    # to try it without
"""

import argparse
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import distributed as dist
from torch import nn

from resilience_sdk import preemption
from resilience_sdk.adapters import megatron

CONTEXT, BATCH = 16, 32


class Letters(MegatronModule):
    """Scores the next letter of the source code of Python's argparse, in one pipeline stage."""

    model_type, share_embeddings_and_output_weights = ModelType.encoder_or_decoder, False

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128))
        self.set_input_tensor, self.forward = lambda tensor: None, self.net.forward


def main(steps: int = 100) -> None:
    """Train for so many steps, over all starts with the same run directory."""
    dist.init_process_group()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)  # all replicas begin alike
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1}
    config = TransformerConfig(**shape, finalize_model_grads_func=finalize_model_grads)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Letters(config).cuda())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=0.0), [model])

    def sharded_state(is_loading=False):
        state = model.module.sharded_state_dict()
        return {"model": state, "optimizer": optimizer.sharded_state_dict(state, is_loading=is_loading)}

    def load(state):
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def forward_step(batches, model):
        batch = next(batches).cuda()
        return model(batch[:, :-1]), lambda scores: (nn.functional.cross_entropy(scores, batch[:, -1]), {})

    saver = megatron.checkpointer(sharded_state, load, every=20)
    first, rank, ranks = saver.resume(), dist.get_rank(), dist.get_world_size()
    codes = torch.tensor([min(ord(letter), 127) for letter in Path(argparse.__file__).read_text()])
    batches = iter(codes.unfold(0, CONTEXT + 1, 1)[first * BATCH * ranks + rank :: ranks].split(BATCH))
    given = {"seq_length": 1, "micro_batch_size": BATCH, "num_microbatches": 1, "forward_only": False}
    with megatron.attach(config, optimizer, first_step=first) as handle:  # last, when all is made
        while handle.step < steps:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(forward_step_func=forward_step, data_iterator=batches, model=[model], **given)
            optimizer.step()
            if handle.should_stop():  # on every rank behind the same step
                saver.save(handle.step)
                preemption.exit()
            saver.maybe_save(handle.step)
    print(f"rank {rank} finished after step {handle.step}")


if __name__ == "__main__":
    assert torch.cuda.is_available(), "megatron.core needs GPUs; examples/megatron_on_cpu.py does without"
    torch.cuda.set_device(dist.get_node_local_rank())
    main()
