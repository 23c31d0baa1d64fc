"""Hang: from what was seen of the ranks to a verdict and its culprit. Pure functions; the monitor does the reading.

In come states of ranks, evidence that others have read (`evidence`: stacks, flight records) and looks
from outside (`activity`); out come notices, verdicts and culprits. `timeouts` decides how long a name may take, by
what was set or learned; `timers` what runs out when for a rank; `detect` who waits for whom and whether the job hangs;
`culprit` whom the verdict names; `notices` what is said before there is one.
"""
