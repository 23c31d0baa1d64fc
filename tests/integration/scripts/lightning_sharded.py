"""Trains with sharded weights on two CPU ranks to step 17, and saves each 5 steps; the argument names the way."""

from __future__ import annotations

import os
import sys

from lightning_module import Module, loader, pl, tell, torch, trainer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from resilience_sdk.adapters.lightning import ResilienceCallback

SAVED, STEPS = 10, 17
rank, attempt = os.environ["RANK"], os.environ["RESILIENCE_INTERNAL_ATTEMPT"]


class Telling(Module):
    """The module; tells what this rank's shards are at the save, and when a training starts."""

    def on_train_start(self) -> None:
        """Tell where this attempt begins, and with what."""
        tell(f"start-{attempt}-{rank}", step=self.trainer.global_step, digest=self.digest())

    def on_train_batch_end(self, *_: object) -> None:
        """Tell what was saved."""
        if self.trainer.global_step == SAVED:
            tell(f"saved-{attempt}-{rank}", digest=self.digest())

    def digest(self) -> list[float]:
        """Return what is equal only for equal shards of the weights and of the optimizer."""
        [optimizer] = self.trainer.optimizers
        parts = []
        for weights in self.parameters():
            state = optimizer.state.get(weights, {})
            parts += [_sum(value) for value in (weights, *(state[name] for name in sorted(state)))]
        return [part for part in parts if part]


def _sum(value: torch.Tensor) -> float:
    local = value.to_local() if isinstance(value, DTensor) else value
    return float((local.detach().double() ** 3).sum())


class Fsdp(pl.strategies.FSDPStrategy):
    """The strategy, which Lightning refuses on a CPU by its class, and torch where the device is not named."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Fsdp2(Telling):
    """The module, sharded by `fully_shard`."""

    def configure_model(self) -> None:
        """Shard."""
        for part in (self.net[0], self.net[3], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


torch.manual_seed(100 + int(rank))
module, strategy = {
    "fsdp": lambda: (Telling(), Fsdp(state_dict_type="sharded", auto_wrap_policy={torch.nn.Linear})),
    "fsdp2": lambda: (Fsdp2(), pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
}[sys.argv[1]]()
callback = ResilienceCallback(checkpoint_every=5)
fitting = trainer(callback, max_steps=STEPS, use_distributed_sampler=False, strategy=strategy, devices=2)
fitting.fit(module, loader())
tell(f"end-{rank}", step=fitting.global_step)
