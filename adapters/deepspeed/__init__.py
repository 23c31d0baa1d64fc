"""DeepSpeed: one line behind `deepspeed.initialize`, with any stage of ZeRO.

    from resilience_sdk.adapters import deepspeed as resilience

    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    with resilience.attach(engine, loader=loader, checkpoint_every="10min") as handle:  # resumes by itself
        for epoch in range(handle.epoch, epochs):
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()

Nothing of DeepSpeed is imported: what is attached is the engine that is there.
"""

from resilience_sdk.adapters.deepspeed.attached import Attached, attach

__all__ = ["Attached", "attach"]
