"""One process, an unchanged loop, a worker whose file system is slow once."""
import time

import torch
from torch.utils.data import DataLoader, Dataset

import told


class Slow(Dataset):
    def __len__(self):
        return told.total()

    def __getitem__(self, index):
        if index == 20:
            told.wait_begins()
            time.sleep(told.pace("wait", 65))
            told.wait_over()
        return index


def main():
    told.up()
    model = told.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    for index in DataLoader(Slow(), batch_size=1, num_workers=1, prefetch_factor=2):  # WAITS
        loss = told.loss_of(model, int(index))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(told.pace("step", 0.1))
        told.did(int(index))
    told.end()


if __name__ == "__main__":
    main()
