"""The places where Megatron-LM calls out, in its shape and under its names, around a loop on the real megatron.core.

`megatron.training` comes with newer releases than the one that is tested with; the adapter takes it by its names alone,
and so these are what it meets: globals that are there before the call, the sections of `ft_integration`, the order of
`pretrain` and `train`, a tracker file written last. The order is that of its commit 04b08b02501d and of release 0.19.2;
`--older` is that of 0.17 and before. `test_megatron_lm.py` runs the real one.
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
import torch
import torch.distributed as dist
from megatron.core import Timers, dist_checkpointing
from megatron_training import Model, Training, own_batches, start

global_vars: Any = types.ModuleType("megatron.training.global_vars")
ft_integration: Any = types.ModuleType("megatron.training.ft_integration")
sys.modules |= {each.__name__: each for each in (global_vars, ft_integration)}
global_vars._GLOBAL_ARGS = global_vars._GLOBAL_TIMERS = global_vars._GLOBAL_SIGNAL_HANDLER = None
ft_integration._GLOBAL_RANK_MONITOR_CLIENT = None


def parse_and_validate_args() -> argparse.Namespace:
    """Read the arguments that the tests use of Megatron-LM's, and set the globals, but for an older version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--exit-interval", type=int, default=0)
    parser.add_argument("--eval-interval", type=int, default=0)
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--older", action="store_true", help="globals, and the provider of the model, in `pretrain`")
    parser.add_argument("--asked-early", action="store_true", help="SIGTERM to rank 1 in the load of a checkpoint")
    parser.add_argument("--enable-ft-package", action="store_true")
    parser.add_argument("--reject-at", type=int, default=-1, help="leave with this code, as a rejected result does")
    parser.add_argument("--reject-code", type=int, default=16)
    args = parser.parse_args()
    args.rank = int(os.environ["RANK"])
    if not args.older:
        set_global_variables(args)
    return args


def set_global_variables(args: argparse.Namespace) -> None:
    """Set arguments, timers and the handler of signals."""
    global_vars._GLOBAL_ARGS = args
    global_vars._GLOBAL_TIMERS = Timers(0, "minmax")
    if args.exit_signal_handler:
        global_vars._GLOBAL_SIGNAL_HANDLER = LocalSignalHandler()


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


class Sections:
    """`ft_integration`: what NVRx's client, or whatever stands in its place, is told."""

    _NUM_WARMUP_ITERS = 1

    def __init__(self) -> None:
        self._is_setting_up = False

    def setup(self, args: argparse.Namespace) -> None:
        """Start NVRx's client, where that is asked for."""
        if not args.enable_ft_package:
            return
        package = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
        client = package.RankMonitorClient()
        assert ft_integration._GLOBAL_RANK_MONITOR_CLIENT is None
        ft_integration._GLOBAL_RANK_MONITOR_CLIENT = client
        client.init_workload_monitoring(num_warmup_iters=self._NUM_WARMUP_ITERS)
        client.start_section("setup")
        self._is_setting_up = True

    def on_step_start(self, seen: int) -> None:
        """Open the section of a step, behind the first few."""
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        if client is None:
            return
        if self._is_setting_up:
            client.end_section("setup")
            self._is_setting_up = False
        if seen >= self._NUM_WARMUP_ITERS:
            client.start_section("step")

    def on_step_end(self, seen: int) -> None:
        """Close it."""
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        if client is not None and seen >= self._NUM_WARMUP_ITERS:
            client.end_section("step")

    def on_checkpointing_start(self) -> None:
        """Open the section of a save, and of each look at one in the background."""
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        client and client.start_section("checkpointing")

    def on_checkpointing_end(self) -> None:
        """Close it."""
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        client and client.end_section("checkpointing")

    def finalize(self) -> None:
        """Look at a save in the background: there is none."""
        self.on_checkpointing_start()
        self.on_checkpointing_end()

    def shutdown(self) -> None:
        """Let the client go."""
        client, ft_integration._GLOBAL_RANK_MONITOR_CLIENT = ft_integration._GLOBAL_RANK_MONITOR_CLIENT, None
        if client is not None:
            client.shutdown_workload_monitoring()


def datasets_provider(_samples: list[int]) -> None:
    """Return nothing: `pretrain` makes its batches."""


def model_provider(pre_process: bool = True, post_process: bool = True) -> Any:
    """Return what makes the model."""
    namespace = argparse.Namespace(raise_at=-1, nan_at=-1, accumulate=1)
    return lambda config: Model(config, contract.Net(namespace))


class Loop:
    """One training."""

    def __init__(self, training: Training, args: argparse.Namespace, sections: Sections) -> None:
        self.training, self.args, self.sections = training, args, sections

    def load(self) -> int:
        """Resume what the tracker names, as `setup_model_and_optimizer` does in the end."""
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
        timers("interval-time").stop()
        timers("save-checkpoint", log_level=0).start(barrier=False)
        self.sections.on_checkpointing_start()
        path = self.args.save / f"iter_{iteration:07d}"
        path.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.training.sharded_state(), str(path))
        dist.barrier()
        if dist.get_rank() == 0:
            (self.args.save / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        self.sections.on_checkpointing_end()
        timers("save-checkpoint").stop(barrier=False)
        timers.log(["save-checkpoint"])
        timers("interval-time", log_level=0).start(barrier=True)

    def should_exit(self, iteration: int) -> bool:
        """Save where it is time, and tell whether to leave, as `checkpoint_and_decide_exit`."""
        args, has_saved = self.args, False
        if args.exit_signal_handler and any(global_vars._GLOBAL_SIGNAL_HANDLER.signals_received()):
            if args.save:
                self.save(iteration)
            return True
        if args.save and iteration % args.save_interval == 0:
            self.save(iteration)
            has_saved = True
        if args.exit_interval and iteration % args.exit_interval == 0:
            if args.save and not has_saved:
                self.save(iteration)
            return True
        return False

    def evaluate(self, forward_step: Any, batches: Any) -> None:
        """Make forwards alone, as `evaluate`: without timers in the configuration."""
        timers, config = global_vars._GLOBAL_TIMERS, self.training.config
        timers("evaluate", log_level=0).start(barrier=True)
        config.timers = None
        with torch.no_grad():
            self.sections.on_step_start(0)
            forward_step(batches, self.training.model)
            self.sections.on_step_end(0)
        config.timers = timers
        timers("evaluate").stop()

    def step(self, batches: Any, forward_step: Any) -> None:
        """Make one step, as `train_step`."""
        timers, plain = global_vars._GLOBAL_TIMERS, self.training.optimizer.step

        def timed_step() -> Any:
            timers("optimizer", log_level=1).start(barrier=False)
            found = plain()
            timers("optimizer").stop()
            return found

        self.training.optimizer.step = timed_step
        self.training.step(batches, forward_step)
        del self.training.optimizer.step

    def train(self, forward_step: Any) -> int:
        """Train, as `train`."""
        args, timers = self.args, global_vars._GLOBAL_TIMERS
        iteration = first = args.iteration
        contract.tell("start", step=iteration)
        self.training.config.timers = timers
        batches = own_batches(iteration, 1)
        timers("interval-time", log_level=0).start(barrier=True)
        exit_code = None
        while iteration < args.train_iters:
            self.sections.finalize()
            args.curr_iteration = iteration
            self.sections.on_step_start(iteration - first)
            self.step(batches, forward_step)
            self.sections.on_step_end(iteration - first)
            if iteration == args.reject_at:
                exit_code = args.reject_code
                break
            iteration += 1
            contract.tell("step", step=iteration)
            if args.eval_interval and iteration % args.eval_interval == 0:
                timers("interval-time").stop()
                timers("eval-time", log_level=0).start(barrier=True)
                self.evaluate(forward_step, batches)
                timers("eval-time").stop()
                timers("interval-time", log_level=0).start(barrier=True)
            if self.should_exit(iteration):
                exit_code = 0
                break
        self.sections.finalize()
        if exit_code is not None:
            dist.barrier()
            self.sections.shutdown()
            sys.exit(exit_code)
        return iteration


def pretrain(
    cfg_container: argparse.Namespace,
    train_valid_test_dataset_provider: Any,
    model_type: str,
    forward_step_func: Any,
    model_provider: Any = None,
) -> None:
    """Do what Megatron-LM's does, in its order."""
    args, sections = cfg_container, Sections()
    sections.setup(args)
    if args.older:
        set_global_variables(args)
    start()
    # What `cfg_container` has of the model is made without a function of the script.
    make_model = model_provider() if args.older else inspect.unwrap(model_provider)()
    loop = Loop(Training(1, make_model), args, sections)
    args.iteration = loop.load()
    train_valid_test_dataset_provider([1])
    iteration = loop.train(forward_step_func)
    if args.save and iteration % args.save_interval != 0:
        loop.save(iteration)
    sections.finalize()
    sections.shutdown()
