"""Snippets as NVIDIA's and NeMo's documentation has them, and what makes a program of each.

Nothing of a snippet is changed but its imports, and `...`, which stands for the user's own: see `program`. Left out is
`resume_from_checkpoint=True`, which stands in one of them, and which no trainer takes since Lightning 2; the name of
the dictionary of arguments is the same in both its places, as it is not there.
"""

from __future__ import annotations

IMPORTS = {
    "from nvidia_resiliency_ext.ptl_resiliency import": "from resilience_sdk.adapters.lightning import",
    "from nemo.lightning.pytorch.callbacks import": "from resilience_sdk.adapters.lightning import",
    "from nemo.collections.llm.recipes.callbacks import": "from resilience_sdk.adapters.lightning import",
    "from nemo.lightning.run.plugins import": "from resilience_sdk.adapters.lightning.plugins import",
}
"""Each import of theirs, and ours in its place."""

FAULT_TOLERANCE = """
from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback

fault_tol_cb = FaultToleranceCallback(
    autoresume=True,
    calculate_timeouts=True,
    logger_name="test_logger",
    exp_dir=tmp_path,
)
trainer = pl.Trainer(
    ...
    callbacks=[..., fault_tol_cb],
)
"""

STRAGGLER = """
from nvidia_resiliency_ext.ptl_resiliency import StragglerDetectionCallback

straggler_cb_args = dict(
    report_time_interval=300.0,
    calc_relative_gpu_perf=True,
    calc_individual_gpu_perf=True,
    num_gpu_perf_scores_to_log=3,
    gpu_relative_perf_threshold=0.7,
    gpu_individual_perf_threshold=0.7,
    stop_if_detected=False,
    logger_name="test_logger",
)
straggler_det_cb = StragglerDetectionCallback(**straggler_cb_args)
trainer = pl.Trainer(
    ...
    callbacks=[..., straggler_det_cb],
)
"""

STRAGGLER_OF_NEMO = """
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.recipes.callbacks import straggler_det_callback

trainer = nl.Trainer()
straggler_cb = straggler_det_callback()
trainer.callbacks.append(straggler_cb)
"""

PREEMPTION_OF_NEMO = """
from nemo import lightning as nl
from nemo.collections import llm

from nemo.lightning.pytorch.callbacks import PreemptionCallback

trainer = nl.Trainer()
trainer.callbacks.append(PreemptionCallback())
"""

FOR_LIGHTNING = {
    "fault tolerance": FAULT_TOLERANCE,
    "straggler detection": STRAGGLER,
    "straggler detection of NeMo": STRAGGLER_OF_NEMO,
    "preemption of NeMo": PREEMPTION_OF_NEMO,
}

_OF_THE_USER = {
    "    ...\n": "    **of_the_user,\n",
    "[..., ": "[*callbacks_of_the_user, ",
    # NeMo's trainer is Lightning's; its package is not needed for a callback of ours.
    "from nemo import lightning as nl\n": "",
    "from nemo.collections import llm\n": "",
}


def program(snippet: str, imports: dict[str, str] = IMPORTS) -> str:
    """Return what runs: with other imports, and `of_the_user`, `callbacks_of_the_user` where a user has theirs."""
    for theirs, ours in (imports | _OF_THE_USER).items():
        snippet = snippet.replace(theirs, ours)
    return snippet
