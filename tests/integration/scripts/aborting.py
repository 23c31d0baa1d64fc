"""Ranks that beat five times, of which some are aborted by C++ when Python has shut down: `aborting.py HOW FILE`.

What aborts is `std::terminate()` itself, called among the C library's exit handlers: the words and the signal are those
of torch's thread that asks for the GIL too late, without its chance.

`done`: both ranks, their scripts at their end; `code`: both, after `sys.exit(3)`; `leave`: both, after a stop with 75;
`early`: rank 0, while rank 1 trains on until FILE is there; `middle`: both call it in the middle of the script.
"""

import ctypes
import os
import sys
import time

from resilience_sdk import heartbeat, preemption

how, file = sys.argv[1:]
rank = int(os.environ["RANK"])
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
if how != "early" or rank == 0:
    ctypes.CDLL(None).__cxa_atexit(ctypes.cast(terminate, ctypes.c_void_p), None, None)
for step in range(5):
    with heartbeat(step=step):
        time.sleep(0.001)
if how == "early" and rank == 1:
    while not os.path.exists(file):
        time.sleep(0.01)
    with heartbeat(step=5):
        sys.stdout.write("trained on\n")
if how == "middle":
    terminate()
if how == "code":
    sys.exit(3)
if how == "leave":
    preemption.exit()
