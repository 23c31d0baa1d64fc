"""DataLoader workers in every context; each outcome is a list of batches or the error's type."""

import multiprocessing
import os


class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return [index * index, os.environ["RANK"]]


def keep(batch):
    return batch


def outcome(context, collate=keep):
    import torch.utils.data

    try:
        loader = torch.utils.data.DataLoader(
            Squares(), num_workers=1, batch_size=2, collate_fn=collate, multiprocessing_context=context
        )
        return list(loader)
    except Exception as error:
        if multiprocessing.parent_process() is not None:
            raise  # a worker that imported the script again: its failure must stay one
        return f"{type(error).__name__}: {str(error).splitlines()[0].split('(pid')[0]}"
