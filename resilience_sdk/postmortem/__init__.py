"""Postmortem: what the end of an attempt comes to, whoever launched it: our launcher, or the monitor under another one.

In come the facts of an ended attempt (`facts`): exits, what the ranks left, and what `collect` finds in logs and in the
kernel's words. `crash` makes an incident and the end to be decided on of a death, `preemption` of a job that was asked
to leave, `recovery` closes what the job got over and finds what stood still before somebody ended it. `report` decides
which of these it was, and which node reports it for all; `outcome` is what `outcome.json` holds.
"""
