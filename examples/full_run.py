"""One object resumes, beats, saves and stops; the loop stays a loop.

    resilience run --nproc-per-node 2 --run-dir runs/plane examples/full_run.py
    RESILIENCE_FAULT=kill:rank=1,step=70 resilience run ... (the same): restarted, and the same result

Run again with the same `--run-dir`, it says that it is finished; interrupted, it goes on where it was.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilience_sdk
from resilience_sdk import numerics, straggler


def make_data(count: int = 2560) -> TensorDataset:
    """Return points of a noisy plane."""
    inputs = torch.randn(count, 8)
    return TensorDataset(inputs, inputs @ torch.randn(8, 1) + 0.1 * torch.randn(count, 1))


def main() -> None:
    """Train for two epochs, whatever happens in between."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = make_data()
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    straggler.attach(model, optimizer)  # sections fwd, bwd and optim, compared over the ranks
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    with resilience_sdk.start_run(state=state, checkpoint_every=20) as run:
        for epoch in run.epochs(2):
            for step, (inputs, targets) in run.steps(loader):
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                numerics.check(loss=loss)  # tells of NaN, infinity and spikes, without waiting for a device
                # Plain values travel with the checkpoint.
                run.values["best"] = min(run.values.get("best", float("inf")), loss.item())
                if step % 20 == 0 and dist.get_rank() == 0:
                    print(f"epoch {epoch}  step {step:2}  loss {loss.item():.4f}")
            scheduler.step()  # what stands here is done once per epoch, also where the training was cut short

    if dist.get_rank() == 0:
        print(f"best loss {run.values['best']:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
