"""One object; the state has some weight, so that a save takes its time."""
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import resilience_sdk
import told


def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    state = {"model": model, "optimizer": optimizer, "weight": torch.ones(int(told.pace("megabytes", 1) * 131072), dtype=torch.float64)}
    loader = DataLoader(TensorDataset(torch.arange(told.total())), batch_size=1)
    options = {"checkpoint_async": True} if told.pace("async", False) else {}
    with resilience_sdk.start_run(state=state, checkpoint_every=10, **options) as run:
        for step, _ in run.steps(loader):
            loss = told.loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(told.pace("step", 0.2))
            told.did(step)
            if step == told.pace("die_at", -1) and told.rank() == 1 and not os.path.exists(told.file("died")):
                open(told.file("died"), "w").close()
                told.tell("before_death")
                told.await_file("go")
                os.kill(os.getpid(), signal.SIGKILL)
    told.final(model, told.total())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
