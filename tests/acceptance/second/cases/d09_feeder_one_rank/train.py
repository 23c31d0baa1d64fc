"""One process trains, another one feeds it; saves by torch.save, no SDK."""
import multiprocessing
import os
import time

import torch

import told


def feed(queue, start, count):
    told.tell("feeder", host_pid=os.getpid())
    for step in range(start, count):
        queue.put(step)
    queue.put(None)


def main():
    told.up()
    model = told.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    start = 0
    if os.path.exists("mine.pt"):
        saved = torch.load("mine.pt")
        model.load_state_dict(saved["model"])
        start = saved["step"]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(4)
    feeder = context.Process(target=feed, args=(queue, start, told.total()))
    feeder.start()
    while (step := queue.get()) is not None:
        loss = told.loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(told.pace("step", 0.2))
        told.did(step)
        if (step + 1) % 10 == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, "mine.pt.tmp")
            os.replace("mine.pt.tmp", "mine.pt")
    feeder.join()
    told.final(model, told.total())


if __name__ == "__main__":
    main()
