"""Two pipeline stages of megatron-core, of which the second takes longer: until a file `enough` is in TOLD."""

from __future__ import annotations

import time
from typing import Any


def main() -> None:
    """Train."""
    import contract_script as contract
    import torch
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule
    from megatron_training import Training, own_batches, start
    from torch import distributed as dist
    from torch import nn

    from resilience_sdk.adapters import megatron

    class Stage(MegatronModule):
        """One of two stages."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.pre_process = parallel_state.is_pipeline_first_stage()
            self.post_process = parallel_state.is_pipeline_last_stage()
            self.body = nn.Linear(contract.WIDTH, 1 if self.post_process else contract.WIDTH)
            self._given: Any = None

        def set_input_tensor(self, tensors: list[Any]) -> None:
            """Take what the stage before gives."""
            [self._given] = tensors

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """Return what this stage makes of it."""
            if self.post_process:
                time.sleep(0.01)  # the work of a larger stage
            return self.body(inputs.unsqueeze(0) if self._given is None else self._given)

    start(stages=2)
    training = Training(2, Stage, stages=2)
    batches = own_batches(0, 2)
    with megatron.attach(training.config, training.optimizer, first_step=0) as handle:
        is_over = False
        while not is_over:
            training.step(batches)
            contract.tell("step", step=handle.step)
            enough = torch.tensor([int((contract.told / "enough").exists())])
            dist.all_reduce(enough, dist.ReduceOp.MAX)
            is_over = bool(enough)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
