"""As `repeated.py`, with `pretrain()` of Megatron-LM: `repeated_pretrain.py KIND WORDS`, with words of Megatron's."""

import functools
import random
import sys

import cpu_megatron_lm
import torch
from repeated_kinds import IS_AGAIN, KIND, plant
from torch.utils.data import DataLoader, Dataset

SAMPLES = 4
"""Of a step."""


class Augmented(Dataset):
    """Other values each time, on purpose."""

    def __init__(self, plain):
        self.plain = plain

    def __len__(self):
        return len(self.plain)

    def __getitem__(self, index):
        item = self.plain[index]
        return {**item, "loss_mask": item["loss_mask"] * random.SystemRandom().random()}


def plant_in_megatron():
    """Change what Megatron does behind the resume."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    plain_iter, plain_step = MegatronPretrainingSampler.__iter__, OptimizerParamScheduler.step

    def drawn(sampler):
        if KIND == "shard":
            sampler.consumed_samples += SAMPLES // 2
        for number, batch in enumerate(plain_iter(sampler)):
            if KIND == "order" or (KIND == "batch" and number == 2):
                batch = batch[::-1]
            yield batch

    if KIND in ("order", "batch", "shard"):
        MegatronPretrainingSampler.__iter__ = drawn
    if KIND == "rate":
        # Not in its load, which goes on by all steps at once.
        OptimizerParamScheduler.step = lambda self, increment: plain_step(
            self, increment * (1 + (increment == SAMPLES))
        )


def main():
    """Train as `pretrain_gpt.py` of Megatron-LM does."""
    del sys.argv[1]
    if KIND == "cyclic":
        sys.argv += ["--dataloader-type", "cyclic"]
    if KIND.startswith("external"):
        sys.argv += ["--dataloader-type", "external"]
    if KIND == "batch size" and IS_AGAIN:
        sys.argv += ["--global-batch-size", "8"]
    cpu_megatron_lm.install()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.training import get_args, get_tokenizer, global_vars, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from resilience_sdk.adapters import megatron

    def loss_of(batch, losses):
        mask = batch["loss_mask"]
        loss, tokens = (losses.float() * mask).sum(), mask.sum().int()
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        if torch.is_grad_enabled():
            plant(get_args().curr_iteration, model)
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        return output, functools.partial(loss_of, batch)

    def datasets_provider(samples):
        args = get_args()
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            split="8,1,1",
            tokenizer=get_tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        train, *others = BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()
        if KIND in ("augmented", "external random"):
            train = Augmented(train)
        if KIND.startswith("external"):
            train = iter(DataLoader(train, 2, sampler=range(args.consumed_train_samples, len(train))))
            others = [iter(DataLoader(one, 2)) for one in others]
        return train, *others

    datasets_provider.is_distributed = True
    args = parse_and_validate_args()
    if global_vars._GLOBAL_TIMERS is None:
        global_vars.initialize_runtime_services(args)  # which newer commits leave to the script
    if IS_AGAIN:
        plant_in_megatron()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    megatron.around(pretrain)(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
