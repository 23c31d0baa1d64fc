"""One process that fits in all kinds of ways; the first argument says how."""

from __future__ import annotations

import os
import signal
import sys
import threading

from lightning_module import Module, digest, loader, pl, tell, told, torch, trainer

from resilience_sdk.adapters.lightning import FaultToleranceCallback, ResilienceCallback

RUN_DIR = os.environ["RESILIENCE_RUN_DIR"]


def held() -> dict[str, int]:
    """Return what a process holds: descriptors and threads."""
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def many() -> None:
    """Fit 50 times, each time with everything new."""
    before = {}
    for number in range(50):
        trainer(ResilienceCallback(checkpoint_every=2), max_steps=3).fit(Module(), loader(64))
        if number == 1:
            before = held()
    tell("end", before=before, after=held(), handler=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


def kinds() -> None:
    """Try out, evaluate, fit in a thread, fit again, raise in a fit, idle, ask a person; the deadlines are short."""
    callback = ResilienceCallback()
    trainer(callback, fast_dev_run=True).fit(Module(), loader(64), loader(8))
    saved = [name for name in os.listdir(f"{RUN_DIR}/checkpoints") if name.startswith("step-")]
    after_trial = os.path.exists(f"{RUN_DIR}/finished"), len(saved)
    trainer(callback).validate(Module(), loader(64), verbose=False)
    thread = threading.Thread(target=lambda: trainer(callback, max_steps=5).fit(Module(), loader(64)))
    thread.start()
    thread.join()
    again = trainer(callback, max_steps=5)
    again.fit(Module(), loader(64), loader(8))
    again.fit_loop.epoch_loop.max_steps = 9
    again.fit(again.lightning_module, loader(64))
    went_on_to = again.global_step
    flags = []
    for_nvidia = FaultToleranceCallback(autoresume=True, calculate_timeouts=True)
    for _ in range(2):
        os.unlink(f"{RUN_DIR}/finished")
        trainer(for_nvidia, max_steps=5).fit(Module(), loader(64))
        flags.append(os.path.exists(f"{RUN_DIR}/finished"))
    raised = None
    try:
        trainer(callback, Raising(), max_steps=5).fit(Module(), loader(64))
    except ValueError as error:
        raised = str(error)
    tell("end", after_trial=after_trial, went_on_to=went_on_to, flags=flags, raised=raised)
    release = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: release.set())
    tell("idle", pid=os.getpid())
    release.wait(60)
    trainer(callback, Asking(), max_steps=20).fit(Module(), loader(64))


class Asking(pl.Callback):
    """Asks a person in the middle of a fit."""

    def on_train_batch_start(self, fitting: object, module: object, batch: object, batch_idx: int) -> None:
        """Ask."""
        if batch_idx == 8:
            breakpoint()
            tell("answered")


class Raising(pl.Callback):
    """Raises in the middle of a fit."""

    def on_train_batch_start(self, fitting: object, module: object, batch: object, batch_idx: int) -> None:
        """Raise."""
        if batch_idx == 2:
            raise ValueError("a bug of the user")


def once() -> None:
    """Fit to the step of the second argument, by the path that the callback tells where there is a third."""
    callback = ResilienceCallback(RUN_DIR, checkpoint_every=100_000)
    torch.manual_seed(7)
    module = Module()
    fitting = trainer(callback, max_steps=int(sys.argv[2]))
    path = callback.ckpt_path if len(sys.argv) > 3 else None
    fitting.fit(module, loader(), ckpt_path=path)
    tell("end", step=fitting.global_step, digest=digest(module), path=path)


def automatic() -> None:
    """Fit with no callback in code."""
    fitting = trainer(max_steps=int(sys.argv[2]))
    fitting.fit(Module(), loader())
    tell("end", step=fitting.global_step, callbacks=[type(each).__name__ for each in fitting.callbacks])


class Parts(Module):
    """Optimizes by hand, and calls its parts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Make the step."""
        self.manual_backward(self.net(batch).pow(2).mean())
        self.optimizers().step()


def manual() -> None:
    """Fit by hand."""
    fitting = trainer(ResilienceCallback(), max_steps=6)
    fitting.fit(Parts(), loader(64))
    tell("end", step=fitting.global_step)


told.mkdir(exist_ok=True)
{"many": many, "kinds": kinds, "once": once, "automatic": automatic, "manual": manual}[sys.argv[1]]()
