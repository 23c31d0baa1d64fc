"""A task of NeMo-Run that stands in for a recipe of NeMo: it has a trainer and a log, and trains.

Started as a script, it is what a user of NeMo's documentation runs: `local` or `slurm`, and where to log.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import nemo_run as run
from lightning_module import Module, loader, pl, tell


@dataclass
class Log:
    """As NeMo's logger, as far as its plugins look at it."""

    log_dir: str


def pretrain(trainer: pl.Trainer, log: Log) -> None:
    """Train as far as the trainer says.

    In the first attempt of a local job rank 1 dies in step 5; a job of Slurm takes its time before it is requeued.
    """
    is_slurm, is_again = "SLURM_JOB_ID" in os.environ, "SLURM_RESTART_COUNT" in os.environ
    is_first = os.environ["RESILIENCE_INTERNAL_ATTEMPT"] == "0"

    class Faulty(Module):
        def training_step(self, batch: object, batch_idx: int) -> object:
            if is_slurm and not is_again:
                time.sleep(0.1)
            elif is_first and not is_slurm and (trainer.global_rank, trainer.global_step) == (1, 5):
                os.kill(os.getpid(), 9)
            return super().training_step(batch, batch_idx)

    trainer.fit(Faulty(), loader(), ckpt_path="last")
    tell(
        f"end-{trainer.global_rank}", step=trainer.global_step, callbacks=[type(c).__name__ for c in trainer.callbacks]
    )


def pretrain_recipe(name: str, log_dir: str, devices: int, max_steps: int) -> run.Partial:
    """Return the configuration of a training, as NeMo's recipes do."""
    return run.Partial(
        pretrain,
        trainer=run.Config(
            pl.Trainer,
            accelerator="cpu",
            devices=devices,
            strategy="ddp",
            max_steps=max_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[run.Config(pl.callbacks.ModelCheckpoint, dirpath=log_dir, save_last=True)],
        ),
        log=run.Config(Log, log_dir=log_dir),
    )


if __name__ == "__main__":
    import nemo_recipe  # the task is found by this name, not by __main__

    from resilience_sdk.adapters.lightning.plugins import FaultTolerancePlugin, PreemptionPlugin

    where, folder = sys.argv[1:]
    env = {name: os.environ[name] for name in ("PYTHONPATH", "TOLD", "RESILIENCE_PAGE_DIR")}
    if where == "local":
        recipe = nemo_recipe.pretrain_recipe(
            name="llama3_with_fault_tolerance", log_dir=folder, devices=2, max_steps=12
        )
        executor = run.LocalExecutor(ntasks_per_node=2, env_vars=env)
    else:
        recipe = nemo_recipe.pretrain_recipe(name="llama3_with_preemption", log_dir=folder, devices=2, max_steps=600)
        executor = run.SlurmExecutor(
            account="none",
            partition="all",
            ntasks_per_node=2,
            time="00:10:00",
            tunnel=run.LocalTunnel(job_dir=f"{os.environ['NEMORUN_HOME']}/experiments"),
            packager=run.Packager(),
            env_vars={**env, "PATH": os.environ["PATH"]},
        )

    run_plugins = [FaultTolerancePlugin(), PreemptionPlugin()]
    run.run(recipe, plugins=run_plugins, executor=executor, detach=where == "slurm")
