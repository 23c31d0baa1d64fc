"""A loop of one's own on `megatron.core` with `megatron.checkpointer`, as docs/adapters/megatron.md writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import telling as t
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "integration/scripts"))
import cpu_megatron
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from resilience_sdk import preemption
from resilience_sdk.adapters import megatron

o = t.options
STEPS = 6 // t.ACCUMULATE  # of an epoch


class Model(MegatronModule):
    """The network as Megatron wants a model."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.net = t.same_net()

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what the stage before gives: nothing, there is one stage."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        return self.net(batch)


def loader_of(kind: str) -> Any:
    """Return the loader; None where the loop goes by the number of its steps."""
    data, workers = t.Noisy(), 2 if "workers" in kind else 0
    if kind == "by steps":
        return None
    if t.ranks > 1:
        return StatefulDataLoader(data, t.BATCH, sampler=DistributedSampler(data, t.ranks, t.rank), num_workers=workers)
    return StatefulDataLoader(data, t.BATCH, shuffle=True, num_workers=workers)


def round_and_round(loader: Any) -> Iterator[torch.Tensor]:
    """Yield its batches for ever."""
    while True:
        yield from loader


def from_step(first: int) -> Iterator[torch.Tensor]:
    """Yield batches behind so many steps, in an order that is drawn by the epoch."""
    number = first * t.ACCUMULATE
    while True:
        epoch, place = divmod(number, t.LENGTH // (t.BATCH * t.ranks))
        order = torch.randperm(t.LENGTH, generator=torch.Generator().manual_seed(epoch))[t.rank :: t.ranks].tolist()
        yield torch.stack([t.noisy(index) for index in order[place * t.BATCH :][: t.BATCH]])
        number += 1


def main() -> None:
    """Train."""
    cpu_megatron.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(t.rank, None, t.BATCH * t.ACCUMULATE * t.ranks, t.BATCH, t.ranks)
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = TransformerConfig(**shape, finalize_model_grads_func=finalize_model_grads)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Model(config))
    net = model.module.net
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.02, min_lr=0.0, clip_grad=0.0), [model])
    rates = {"init_lr": 0.0, "max_lr": 0.02, "min_lr": 0.001, "lr_warmup_steps": 0, "lr_decay_steps": 20}
    decay = {"lr_decay_style": "cosine", "start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 20}
    schedule = OptimizerParamScheduler(optimizer, **rates, **decay, wd_incr_style="constant")
    average = torch.zeros(())
    loader = loader_of(o["loader"])
    state = {"schedule": schedule, "average": average} | ({} if loader is None else {"loader": loader})

    def sharded_state(is_loading: bool = False) -> dict[str, Any]:
        parts = model.module.sharded_state_dict()
        return {"model": parts, "optimizer": optimizer.sharded_state_dict(parts, is_loading=is_loading)}

    def load(parts: Any) -> None:
        model.module.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])

    micro = 0

    def forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
        nonlocal micro
        batch, number = next(batches), handle.step * t.ACCUMULATE + micro
        if micro == 1:
            t.reach("window", handle.step)
        micro += 1
        if model.training:
            t.tell_batch(number, batch)

        def loss_of(output: torch.Tensor) -> Any:
            loss = (output - batch.mean(1, keepdim=True) / 5).square().mean()
            if model.training:
                t.tell("losses", number, loss.item())
            return loss, {"loss": loss.detach()}

        return model(batch), loss_of

    def passed(batches: Iterator[torch.Tensor], count: int, *, forward_only: bool) -> Any:
        nonlocal micro
        micro = 0
        given = {"forward_step_func": forward_step, "data_iterator": batches, "model": [model], "seq_length": 1}
        given |= {"micro_batch_size": t.BATCH, "num_microbatches": count, "forward_only": forward_only}
        return get_forward_backward_func()(**given)

    def train_step() -> None:
        step = handle.step
        t.at_step(step)
        t.tell("epoch", step, step // STEPS)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = passed(batches, t.ACCUMULATE, forward_only=False)
        optimizer.step()
        schedule.step(1)
        average.mul_(0.9).add_(losses[-1]["loss"] * 0.1)
        t.tell("learning rates", step, optimizer.param_groups[0]["lr"])
        t.tell_generators(step)
        t.tell("weights", step, t.digest([one.detach() for one in net.parameters()]))
        t.tell("averages", step, average.item())
        states = optimizer.chained_optimizers[0].optimizer.state.values()
        parts = [(one["exp_avg"], one["exp_avg_sq"], float(one["step"])) for one in states if one]
        t.tell("optimizer and scaler", step, t.digest(parts))

    def evaluate(epoch: int) -> None:
        model.eval()
        found = []
        with torch.no_grad():
            for index, batch in enumerate(DataLoader(t.Noisy(12, 200), 4)):
                if index == 1:
                    t.reach("evaluation", epoch)
                found += [one["loss"].item() for one in passed(iter([batch]), 1, forward_only=True)]
        model.train()
        t.tell("evaluations", epoch, found)

    t.seed()
    batches = None if loader is None else round_and_round(loader)
    saver = megatron.checkpointer(sharded_state, load, state=state, every=t.EVERY)
    first = saver.resume()
    if batches is None:
        batches = from_step(first)
    handle = megatron.attach(config, optimizer, first_step=first)
    while handle.step < t.EPOCHS * STEPS:
        train_step()
        if handle.step % STEPS == 0:
            epoch = handle.step // STEPS - 1
            evaluate(epoch)
            t.tell_generators(f"epoch {epoch}")
            t.reach("behind", epoch)
        if handle.should_stop():
            saver.save(handle.step)
            preemption.exit()
        saver.maybe_save(handle.step)
    handle.detach()
    saver.save(handle.step)
    t.tell("end", "draw", [torch.rand(()).item(), t.digest([one.detach() for one in net.parameters()])])
    dist.destroy_process_group()
