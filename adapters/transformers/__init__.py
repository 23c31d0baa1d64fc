"""Hugging Face Transformers: a callback for `Trainer` and its subclasses.

    from resilience_sdk.adapters.transformers import ResilienceCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[ResilienceCallback()])
    trainer.train()  # resumes by itself

`transformers` is not imported before the first callback is made.
"""

from resilience_sdk.adapters.transformers.callback import ResilienceCallback
from resilience_sdk.adapters.transformers.saving import last_checkpoint

__all__ = ["ResilienceCallback", "last_checkpoint"]
