"""Accelerate with the adapter's one line."""
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import told
from resilience_sdk.adapters import accelerate as resilience


def main():
    told.up()
    accelerator = Accelerator(cpu=True)
    net = told.new_model()
    data = TensorDataset(torch.arange(240))
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=told.LR), DataLoader(data, batch_size=2))
    with resilience.attach(accelerator, checkpoint_every=25) as handle:
        while handle.step < told.total():
            for _ in loader:
                step = handle.step
                loss = told.loss_of(model, step)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(told.pace("step", 0.3))
                told.did(step)
                if handle.step >= told.total():
                    break
    told.final(accelerator.unwrap_model(model), handle.step)
    accelerator.end_training()


if __name__ == "__main__":
    main()
