"""Runs the snippets of NVIDIA's and NeMo's documentation, one training after another, with a user's trainer around.

With the argument `unchanged` also their imports are left as they are.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from lightning_module import Module, loader, pl, tell, told

sys.path.insert(0, str(Path(__file__).parents[1]))
from documented_snippets import FOR_LIGHTNING, IMPORTS, program

of_the_user = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 6,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
for name, snippet in FOR_LIGHTNING.items():
    scope = {
        "pl": pl,
        "nl": SimpleNamespace(Trainer=partial(pl.Trainer, **of_the_user)),
        "tmp_path": Path(told).parent,
        "of_the_user": of_the_user,
        "callbacks_of_the_user": [pl.callbacks.Timer()],
    }
    exec(program(snippet, {} if "unchanged" in sys.argv else IMPORTS), scope)
    fitting = scope["trainer"]
    fitting.fit(Module(), loader())
    tell(name, step=fitting.global_step, callbacks=[type(callback).__name__ for callback in fitting.callbacks])
