"""Hugging Face Accelerate: one line behind `accelerator.prepare`.

    from resilience_sdk.adapters import accelerate as resilience

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with resilience.attach(accelerator, checkpoint_every="10min") as handle:  # resumes by itself
        for epoch in range(handle.epoch, epochs):
            for batch in loader:
                train_step(batch)

Accelerate is not imported before the first use.
"""

from resilience_sdk.adapters.accelerate.attached import Attached, attach, tracker

__all__ = ["Attached", "attach", "tracker"]
