import os
import work
work.log("up")
import time
import warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs=None, labels=None):
        out = self.net(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Upload(TrainerCallback):
    """As many have it: what was saved is copied to a bucket, on rank 0, while the trainer waits."""

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(work.pace("step", 0.1))
        work.log("step", step=state.global_step - 1)

    def on_save(self, args, state, control, **kwargs):
        if args.process_index == 0:
            work.log("upload", step=state.global_step)
            work.busy(work.pace("upload", 6))
            work.log("upload_done", step=state.global_step)


generator = torch.Generator().manual_seed(7)
inputs = torch.randn(4096, 4, generator=generator)
data = [{"inputs": x, "labels": x.sum(0, keepdim=True).sin()} for x in inputs]
callbacks = [Upload()]
if not os.environ.get("STOPS_PLAIN"):
    from resilience_sdk.adapters.transformers import ResilienceCallback

    callbacks.append(ResilienceCallback())
args = TrainingArguments(
    output_dir=os.path.join(work.HERE, "out"), per_device_train_batch_size=8, max_steps=work.TOTAL, save_steps=10, save_total_limit=3,
    logging_steps=1000, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, learning_rate=0.01, dataloader_num_workers=0,
)
model = Model()
trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
trainer.train()
work.finish(model, trainer.state.global_step)
