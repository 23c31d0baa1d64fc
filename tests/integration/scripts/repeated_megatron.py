"""As `repeated.py`, with a loop of one's own on megatron.core: `repeated_megatron.py KIND`."""

import logging
import warnings

import cpu_megatron
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig
from repeated_kinds import (
    FACTOR,
    IS_HERE,
    KIND,
    PER_STEP,
    RANKS,
    Mean,
    Model,
    Scheduler,
    make_loader,
    plant,
    restored,
    set_own_rate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk import preemption
from resilience_sdk.adapters import megatron

BATCH = 4


class Net(MegatronModule):
    """A model as Megatron wants it."""

    model_type, share_embeddings_and_output_weights = ModelType.encoder_or_decoder, False

    def __init__(self, config):
        super().__init__(config)
        self.net = Model()
        if RANKS > 1:
            self.net[1] = torch.nn.Identity()  # Megatron saves the averages of one rank for all
        self.set_input_tensor, self.forward = lambda tensor: None, self.net.forward


def main():
    """Train."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    plain, mean = make_loader(), Mean()
    shape = {"num_layers": 1, "hidden_size": 2, "num_attention_heads": 1}
    config = TransformerConfig(**shape, finalize_model_grads_func=finalize_model_grads)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Net(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0), [model])
    [inner] = optimizer.chained_optimizers
    scheduler = Scheduler(inner.optimizer)
    if KIND == "stream":
        loader = StatefulDataLoader(plain.dataset, BATCH)
    elif KIND in ("no loader", "skipping"):
        loader = plain
    else:
        workers = {"num_workers": plain.num_workers, "in_order": plain.in_order}
        loader = StatefulDataLoader(plain.dataset, batch_sampler=plain.batch_sampler, **workers)

    def sharded_state(is_loading=False):
        state = model.module.sharded_state_dict()
        return {"model": state, "optimizer": optimizer.sharded_state_dict(state, is_loading=is_loading)}

    def load(state):
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        restored(model.module.net)
        if KIND == "momentum" and IS_HERE:
            inner.optimizer.state.clear()
        if KIND == "options" and IS_HERE:
            inner.param_groups[0]["weight_decay"] = 0.5

    def forward_step(batches, wrapped):
        [batch] = next(batches)
        plant(handle.step, model.module.net)

        def loss_of(outputs):
            loss = outputs.square().mean() * FACTOR
            mean.value += loss.item()
            return loss, {}

        return wrapped(batch), loss_of

    def passes():
        while True:
            if KIND == "skipping":
                torch.manual_seed(3)  # of the order
            yield from loader

    state = {"mean": mean, "scheduler": scheduler, "loader": loader}
    if KIND == "rate":
        del state["scheduler"]
    if loader is plain:
        del state["loader"]
    saver = megatron.checkpointer(sharded_state, load, state=state, every=5)
    first, batches = saver.resume(), passes()
    given = {"loader": loader} if KIND == "skipping" else {}
    handle = megatron.attach(config, optimizer, first_step=first, **given)
    set_own_rate(inner.optimizer, scheduler)
    if KIND == "skipping" and first:
        for _ in range(first):
            next(batches)
        saver.restore_rng()
    micro_batches = {"seq_length": 1, "micro_batch_size": BATCH, "num_microbatches": PER_STEP, "forward_only": False}
    while handle.step < 16:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batches, model=[model], **micro_batches
        )
        optimizer.step()
        scheduler.step()
        if handle.should_stop():
            saver.save(handle.step)
            preemption.exit()
        saver.maybe_save(handle.step)
    handle.detach()
    saver.save(handle.step, last=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    cpu_megatron.install()
    main()
