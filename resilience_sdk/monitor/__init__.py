"""One node's side: a torch-free process that reads the pages of its ranks, and decides.

The package itself imports nothing: `spawn` is used by ranks and launchers, everything else by the monitor's
own process (`program`).
"""
