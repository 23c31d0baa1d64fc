"""DeepSpeed as scripts of the tests have it: on a CPU, where its own collectives would be compiled for a minute."""

from __future__ import annotations

import importlib
import sys

sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type] # imported by its autotuner, for seconds
deepspeed = importlib.import_module("deepspeed")
importlib.import_module("deepspeed.ops").__compatible_ops__ = {}
