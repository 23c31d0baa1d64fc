"""Who fails when: read by the loops, and by who looks at them."""

CULPRIT, STRIKE_AT, STEPS = 1, 50, 100
PAUSE_S = 0.02
