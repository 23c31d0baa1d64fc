# ruff: noqa: E402 - the first facts are taken before anything else is imported
"""A well-behaved script."""

import facts

FIRST = facts.early()

import atexit
import json
import os
import sys
import threading
import time

import loaders


def late():
    time.sleep(0.05)
    print("thread", flush=True)


def main():
    rank = os.environ["RANK"]
    result = facts.all_facts(FIRST)
    if rank == "0" and "PROBE_LOADERS" in os.environ:
        result["loaders"] = {
            "default": loaders.outcome(None),
            "lambda": loaders.outcome(None, lambda batch: batch),
            "spawn": loaders.outcome("spawn"),
            "spawn_lambda": loaders.outcome("spawn", lambda batch: batch),
            "forkserver": loaders.outcome("forkserver"),
        }
    result["stdin_line"] = sys.stdin.readline() if rank == "0" else None
    with open(os.path.join(os.environ["PROBE_OUT"], f"{rank}.json"), "w") as file:
        json.dump(result, file)
    atexit.register(print, "atexit, first registered")
    atexit.register(print, "atexit, last registered")
    threading.Thread(target=late).start()
    os.write(1, b"raw 1\n")
    print("printed")  # unbuffered: between the raw lines without a flush
    os.write(1, b"raw 2\n")
    sys.stdout.write("no newline at the end")
    sys.exit()


if __name__ == "__main__":
    main()
