# ruff: noqa: E402 - the first facts are taken before anything else is imported
"""Run by -m: a module of a package with relative imports and a hook of its own."""

import facts

FIRST = facts.early()

import json
import os
import sys

from . import sibling

with open(os.path.join(os.environ["PROBE_OUT"], f"{os.environ['RANK']}.json"), "w") as file:
    json.dump({**facts.all_facts(FIRST), "sibling": sibling.NAME, "spec_parent": __spec__.parent}, file)


def hook(kind, value, trace):
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    print("hook", kind.__name__, value, frames, file=sys.stderr)


sys.excepthook = hook
raise KeyboardInterrupt("from the script")
