"""The rehearsal of a user's own job: faults are injected into it, and each promise is held against what it left behind.

`plan` chooses the moments of the faults from an undisturbed run, `jobs` runs each in a scratch directory, `judge` holds
the promises against its facts. `resilience rehearse` prints.
"""
