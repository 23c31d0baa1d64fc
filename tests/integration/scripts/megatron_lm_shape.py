"""The places where Megatron-LM calls out, in its shape and under its names, around a loop on the real megatron.core.

Megatron-LM's `megatron.training` is in no package and needs CUDA; the adapter takes it by its names alone, and so these
are what it meets: globals, the client of `ft_integration`, the order of `train()`, a tracker file written last.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import contract_script as contract
import torch.distributed as dist
from megatron.core import Timers, dist_checkpointing
from megatron_training import Model, Training, own_batches, start

global_vars: Any = types.ModuleType("megatron.training.global_vars")
ft_integration: Any = types.ModuleType("megatron.training.ft_integration")
sys.modules |= {each.__name__: each for each in (global_vars, ft_integration)}
global_vars._GLOBAL_ARGS = global_vars._GLOBAL_TIMERS = global_vars._GLOBAL_SIGNAL_HANDLER = None
ft_integration._GLOBAL_RANK_MONITOR_CLIENT = None


def arguments() -> argparse.Namespace:
    """Read the arguments that the tests use of Megatron-LM's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--exit-interval", type=int, default=0)
    parser.add_argument("--eval-interval", type=int, default=0)
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--newest", action="store_true", help="load before any function of the script is called")
    parser.add_argument("--asked-early", action="store_true", help="SIGTERM to rank 1 in the load of a checkpoint")
    parser.add_argument("--enable-ft-package", action="store_true")
    parser.add_argument("--reject-at", type=int, default=-1, help="leave with this code, as a rejected result does")
    parser.add_argument("--reject-code", type=int, default=16)
    return parser.parse_args()


class LocalSignalHandler:
    """What `get_signal_handler()` gives: the flag of this rank alone, without what gathers those of all."""

    def __init__(self) -> None:
        self.sig = signal.SIGTERM
        self._signal_received = False
        self.original_handler = signal.getsignal(self.sig)
        signal.signal(self.sig, self._note)

    def _note(self, *_: Any) -> None:
        self._signal_received = True

    def signals_received(self) -> list[bool]:
        """Tell whether this rank had the signal."""
        return [self._signal_received]


def datasets_provider(_samples: list[int]) -> None:
    """Return nothing: `pretrain` makes its batches."""


def model_provider(pre_process: bool = True, post_process: bool = True) -> Any:
    """Return what makes the model."""
    namespace = argparse.Namespace(raise_at=-1, nan_at=-1, accumulate=1)
    return lambda config: Model(config, contract.Net(namespace))


class Loop:
    """One training."""

    def __init__(self, training: Training, args: argparse.Namespace) -> None:
        self.training, self.args = training, args
        self.loaded: int | None = None

    def load(self) -> int:
        """Resume what the tracker names."""
        if self.args.asked_early and self.args.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        tracker = self.args.save / "latest_checkpointed_iteration.txt" if self.args.save else None
        if tracker is None or not tracker.exists():
            return 0
        iteration = int(tracker.read_text())
        path = str(self.args.save / f"iter_{iteration:07d}")
        timer = global_vars._GLOBAL_TIMERS("load-checkpoint", log_level=0)
        timer.start(barrier=True)
        self.training.load(dist_checkpointing.load(self.training.sharded_state(True), path))
        timer.stop(barrier=True)
        return iteration

    def save(self, iteration: int) -> None:
        """Save, as `save_checkpoint_and_time`."""
        timers = global_vars._GLOBAL_TIMERS
        timers("save-checkpoint", log_level=0).start(barrier=True)
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        client and client.start_section("checkpointing")
        path = self.args.save / f"iter_{iteration:07d}"
        path.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.training.sharded_state(), str(path))
        dist.barrier()
        if dist.get_rank() == 0:
            (self.args.save / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        client and client.end_section("checkpointing")
        timers("save-checkpoint").stop(barrier=True)

    def should_exit(self, iteration: int) -> bool:
        """Save where it is time, and tell whether to leave, as `checkpoint_and_decide_exit`."""
        args = self.args
        if args.exit_signal_handler and any(global_vars._GLOBAL_SIGNAL_HANDLER.signals_received()):
            if args.save:
                self.save(iteration)
            return True
        if args.save and iteration % args.save_interval == 0:
            self.save(iteration)
        return bool(args.exit_interval and iteration % args.exit_interval == 0)

    def evaluate(self, forward_step: Any, batches: Any) -> None:
        """Make forwards alone, as `evaluate`: without timers in the configuration."""
        import torch

        timers, config = global_vars._GLOBAL_TIMERS, self.training.config
        timers("eval-time", log_level=0).start(barrier=True)
        own, config.timers = config.timers, None
        with torch.no_grad():
            forward_step(batches, self.training.model)
        config.timers = own
        timers("eval-time").stop()

    def train(self, forward_step: Any) -> None:
        """Train, as `train`."""
        args, timers = self.args, global_vars._GLOBAL_TIMERS
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        self.training.config.timers = timers
        iteration = args.iteration = self.load() if self.loaded is None else self.loaded
        contract.tell("start", step=iteration)
        batches = own_batches(iteration, 1)
        plain, optimizer = self.training.optimizer.step, self.training.optimizer

        def timed_step() -> Any:
            timers("optimizer", log_level=1).start(barrier=False)
            found = plain()
            timers("optimizer").stop()
            return found

        optimizer.step = timed_step
        is_over = False
        while iteration < args.train_iters and not is_over:
            args.curr_iteration = iteration
            for name in ("checkpointing", "step"):
                client and client.start_section(name)
                if name == "step":
                    self.training.step(batches, forward_step)
                client and client.end_section(name)
            if iteration == args.reject_at:
                sys.exit(args.reject_code)
            iteration += 1
            contract.tell("step", step=iteration)
            if args.eval_interval and iteration % args.eval_interval == 0:
                self.evaluate(forward_step, batches)
            is_over = self.should_exit(iteration)
        if is_over:
            sys.exit(0)


def pretrain(
    train_valid_test_datasets_provider: Any,
    model_provider: Any,
    model_type: str,
    forward_step_func: Any,
    args: argparse.Namespace,
) -> None:
    """Do what Megatron-LM's does, in its order."""
    start()
    args.rank = int(os.environ["RANK"])
    global_vars._GLOBAL_ARGS = args
    global_vars._GLOBAL_TIMERS = Timers(0, "minmax")
    if args.exit_signal_handler:
        global_vars._GLOBAL_SIGNAL_HANDLER = LocalSignalHandler()
    if args.enable_ft_package:
        package = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")  # as `ft_integration.setup`
        ft_integration._GLOBAL_RANK_MONITOR_CLIENT = package.RankMonitorClient()
        ft_integration._GLOBAL_RANK_MONITOR_CLIENT.init_workload_monitoring()
    make_model = inspect.unwrap(model_provider) if args.newest else model_provider
    loop = Loop(Training(1, make_model()), args)
    if args.newest:
        loop.loaded = loop.load()
    train_valid_test_datasets_provider([1])
    loop.train(forward_step_func)
