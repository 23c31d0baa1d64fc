"""Random faults of every kind, struck at a training one after the other until a time or a number is reached.

    python -m tests.chaos [--minutes M] [--faults N] [--seed S] [--json] [--keep DIR]

An episode is one training in a run directory of its own: it is struck again and again, started again where a fault
ends its job, and must end with the losses and weights of the training that nobody disturbed.
"""
