"""Monitor: one torch-free process for each node, which reads the pages of its ranks, and decides.

In come rank pages, /proc and the words of other nodes; out go notices, incidents, signals and words to the ranks.
`spawn` starts it, `main` is its process, `loop` its round. `hang/` decides whether the job hangs, on `evidence` and
`activity` from here; `hang_response` does what follows. `stop` has all ranks agree to leave, on the `notices` of who
asks; `stragglers` and `straggler_response` do the same for slow ranks. `other_launchers` explains deaths where no
launcher of ours does.
"""
