"""A GPT of one layer in Megatron-LM's own `pretrain()`, under the adapter, with the data that Megatron-LM makes up."""

from __future__ import annotations

import functools
import json
import random
from typing import Any


def main() -> None:
    """Train as `pretrain_gpt.py` of Megatron-LM does."""
    import contract_script as contract
    import cpu_megatron_lm
    import torch

    cpu_megatron_lm.install()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import ft_integration, get_args, get_timers, get_tokenizer, global_vars, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from resilience_sdk.adapters import megatron

    def extra_arguments(parser: Any) -> Any:
        parser.add_argument("--nan-at", type=int, default=-1, help="the loss of rank 1 is NaN in this iteration")
        parser.add_argument("--record", help="a line for each iteration of a rank goes into this file with its number")
        parser.add_argument("--alone", action="store_true", help="without the SDK")
        return parser

    def record(tokens: torch.Tensor, loss: torch.Tensor) -> None:
        """Leave what an iteration was made of."""
        args = get_args()
        if args.record and torch.is_grad_enabled():
            facts = [tokens.flatten().tolist(), float(loss), torch.get_rng_state().sum().item(), random.random()]
            with open(f"{args.record}.{args.rank}", "a") as file:
                print(json.dumps([args.curr_iteration, facts]), file=file)

    def loss_of(batch: Any, is_bad: bool, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        mask = batch["loss_mask"]
        loss, tokens = (losses.float() * mask).sum(), mask.sum().int()
        record(batch["tokens"], loss)
        loss = loss * float("nan") if is_bad else loss
        if get_args().check_for_nan_in_loss_and_grad:
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=torch.isnan, message="the loss is NaN", tolerance=0.0, fatal=True
            )
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}

    def forward_step(data_iterator: Any, model: Any) -> Any:
        """Return the losses of the tokens, and what makes the loss of them."""
        args, timers = get_args(), get_timers()
        timers("batch-generator", log_level=2).start()
        batch = next(data_iterator)
        timers("batch-generator").stop()
        is_bad = torch.is_grad_enabled() and (args.curr_iteration, args.rank) == (args.nan_at, 1)
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        return output, functools.partial(loss_of, batch, is_bad)

    def datasets_provider(samples: list[int]) -> Any:
        """Return the three data sets."""
        args = get_args()
        contract.tell("start", step=args.iteration)
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            split="8,1,1",
            tokenizer=get_tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()

    def traces() -> list[str]:
        """Return what stands in the places that the adapter takes."""
        client = ft_integration._GLOBAL_RANK_MONITOR_CLIENT
        known = (global_vars._GLOBAL_TIMERS, global_vars._GLOBAL_SIGNAL_HANDLER, client)
        return [type(each).__name__ for each in known]

    datasets_provider.is_distributed = True  # type: ignore[attr-defined] # each rank makes its own
    args = parse_and_validate_args(extra_arguments)
    if global_vars._GLOBAL_TIMERS is None:
        global_vars.initialize_runtime_services(args)  # which newer commits leave to the script
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    try:
        watched = pretrain if args.alone else megatron.around(pretrain)
        watched(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    finally:
        contract.tell("end", step=getattr(args, "curr_iteration", -1) + 1, traces=traces(), **contract._page())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
