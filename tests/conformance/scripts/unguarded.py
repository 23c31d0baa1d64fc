# ruff: noqa: E402 - the first facts are taken before anything else is imported
import facts

FIRST = facts.early()

import json
import os

import loaders

rank = os.environ["RANK"]
results = {"first": FIRST}
if rank == "0" and (asked := os.environ.get("PROBE_LOADERS")):
    contexts = (None, "spawn", "forkserver") if asked == "all" else ("fork",)
    results["loaders"] = {context or "default": loaders.outcome(context) for context in contexts}
with open(os.path.join(os.environ["PROBE_OUT"], f"{rank}.json"), "w") as file:
    json.dump(results, file)
try:
    {}["inner"]
except KeyError as missing:
    raise ValueError(f"rank {rank} failed on purpose") from missing
