"""A `pretrain()` in the shape of Megatron-LM's, under the adapter; what it calls into is in `megatron_lm_shape`."""

from __future__ import annotations


def main() -> None:
    """Train as a script of Megatron-LM does: hand its functions to `pretrain`."""
    import contract_script as contract
    import megatron_lm_shape as lm
    from torch import nn

    from resilience_sdk.adapters import megatron

    args = lm.parse_and_validate_args()
    forward_calls = []

    def forward_step(data_iterator, model):
        """Return the output, and what makes the loss of it."""
        forward_calls.append(1)
        timers = lm.global_vars._GLOBAL_TIMERS
        timers("batch-generator", log_level=2).start()
        inputs, targets = next(data_iterator)
        timers("batch-generator").stop()
        return model(inputs), lambda outputs: (nn.functional.mse_loss(outputs, targets), {})

    def traces():
        """Return what the adapter may have hung on Megatron."""
        known = lm.global_vars
        return [
            type(known._GLOBAL_TIMERS).__name__,
            type(known._GLOBAL_SIGNAL_HANDLER).__name__,
            type(lm.ft_integration._GLOBAL_RANK_MONITOR_CLIENT).__name__,
        ]

    pretrain = megatron.around(lm.pretrain)
    pretrain(args, lm.datasets_provider, "encoder_or_decoder", forward_step, model_provider=lm.model_provider)
    contract.tell("end", traces=traces(), forwards=len(forward_calls), **contract._page())
    lm.dist.destroy_process_group()


if __name__ == "__main__":
    main()
