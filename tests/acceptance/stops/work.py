"""The work of all training scripts: a small model, data by number, an event log, own saves. Knows nothing of any launcher's product."""

import json
import os
import time

HERE = os.path.dirname(os.path.abspath(__file__))
_pid = [0, 0]


def rank():
    return int(os.environ.get("RANK", "0"))


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


def host_pid():
    """This process as the outermost namespace knows it (cases in a PID namespace do not use it)."""
    return os.getpid()


def log(kind, **more):
    """Append one event to the log, whole."""
    event = {"t": time.monotonic(), "kind": kind, "rank": rank(), "pid": os.getpid(), "launch": int(os.environ.get("STOPS_LAUNCH", "0"))}
    event["attempt"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    event.update(more)
    if kind == "up":
        event["host_pid"] = host_pid()
    fd = os.open(os.path.join(HERE, "events.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, (json.dumps(event) + "\n").encode())
    finally:
        os.close(fd)


def pace(key, default):
    try:
        with open(os.path.join(HERE, "pace.json")) as file:
            return json.load(file).get(key, default)
    except (OSError, ValueError):
        return default


TOTAL = pace("total", 40)


def busy(seconds):
    """Work for so long: a little CPU and short sleeps, as a loop over batches is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(i * i for i in range(20000))
        time.sleep(0.05)


def make():
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(index):
    import torch

    generator = torch.Generator().manual_seed(1000 + int(index))
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()


def loss_of(model, index):
    from torch import nn

    inputs, target = batch(index)
    return nn.functional.mse_loss(model(inputs), target)


def train(model, optimizer, step, index=None):
    """One step of training, slowed down to `pace`."""
    time.sleep(pace("step", 0.1))
    optimizer.zero_grad()
    loss_of(model, step * world() + rank() if index is None else index).backward()
    optimizer.step()
    log("step", step=step)
    if step % 10 == 0 and rank() == 0:
        print(f"train: step {step} done", flush=True)


def weights(model):
    import torch

    with torch.no_grad():
        return [float(v) for p in model.parameters() for v in p.flatten()]


def finish(model, steps, name="final.json"):
    """Rank 0 writes the results."""
    if rank() == 0:
        temporary = os.path.join(HERE, name + ".tmp")
        with open(temporary, "w") as file:
            json.dump({"steps": steps, "weights": weights(model)}, file)
        os.replace(temporary, os.path.join(HERE, name))
    log("end", steps=steps)


def slow_results(seconds, name="results.txt"):
    """Write results line by line for so long; the last line says that they are whole."""
    path = os.path.join(HERE, name)
    log("results", path=path)
    end = time.monotonic() + seconds
    with open(path, "w") as file:
        n = 0
        while time.monotonic() < end:
            file.write(f"prediction {n}\n")
            file.flush()
            n += 1
            time.sleep(0.1)
        file.write("END\n")
    log("results_done")


def whole_results(name="results.txt"):
    try:
        with open(os.path.join(HERE, name)) as file:
            return file.read().endswith("END\n")
    except OSError:
        return False


class Slow:
    """A file that takes its time, as one on a busy network storage does."""

    def __init__(self, path, seconds, size_hint=2_000_000):
        self.file, self.name = open(path, "wb"), path
        self.per_byte = seconds / size_hint

    def write(self, data):
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        for at in range(0, len(view), 50_000):
            piece = view[at : at + 50_000]
            self.file.write(piece)
            self.file.flush()
            time.sleep(len(piece) * self.per_byte)
        return len(view)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()


def save_own(model, optimizer, step, seconds=0.0, whole=True):
    """Save as many scripts do: torch.save to ckpt-<step>.pt; whole: by a temporary name."""
    import torch

    log("saving", step=step)
    path = os.path.join(HERE, f"ckpt-{step:04d}.pt")
    target = path + ".part" if whole else path
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "ballast": torch.zeros(500_000 if seconds else 10)}
    if seconds:
        file = Slow(target, seconds)
        torch.save(state, file)
        file.close()
    else:
        torch.save(state, target)
    if whole:
        os.replace(target, path)
    log("saved", step=step)


def load_own(model, optimizer):
    """Load the newest own checkpoint that can be read, and return the step that is next."""
    import torch

    for name in sorted((n for n in os.listdir(HERE) if n.startswith("ckpt-") and n.endswith(".pt")), reverse=True):
        try:
            state = torch.load(os.path.join(HERE, name), weights_only=True)
        except Exception as error:
            print(f"train: {name} cannot be read ({type(error).__name__}), trying an older one", flush=True)
            continue
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        log("loaded", step=state["step"])
        return state["step"]
    return 0


def readable(path):
    import torch

    try:
        torch.load(path, weights_only=True)
        return True
    except Exception:
        return False


def simulate(total, per_epoch, ranks=2):
    """Print the end of the undisturbed training: the gradients of all ranks, averaged as DDP does."""
    import torch

    torch.set_num_threads(1)
    model, optimizer = make()
    for step in range(total):
        grads = None
        for one in range(ranks):
            optimizer.zero_grad()
            loss_of(model, (step % per_epoch) * ranks + one).backward()
            mine = [p.grad / ranks for p in model.parameters()]
            grads = mine if grads is None else [a + b for a, b in zip(grads, mine)]
        for p, g in zip(model.parameters(), grads):
            p.grad = g
        optimizer.step()
    print(json.dumps({"steps": total, "weights": weights(model)}))


def loader(per_epoch, **options):
    """A loader of indices: rank r gets r, r + world, r + 2 world, ..."""
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    class Numbers(Dataset):
        def __len__(self):
            return per_epoch * world()

        def __getitem__(self, index):
            return index

    data = options.pop("data", None) or Numbers()
    return DataLoader(data, batch_size=1, sampler=DistributedSampler(data, num_replicas=world(), rank=rank(), shuffle=False), **options)
