"""Cluster: the nodes of a job, and the only code that speaks to the store of their rendezvous.

In come files that a monitor writes into the page directory, words that are written once, and the ends of attempts; out
go the same of all other nodes. `membership` decides which node this is, whom it met, and which files are carried;
`leader` is the rule for whoever does alone what every node could do; `bus` carries it all, in a thread and with a
client of its own: a store that is slow or gone delays nobody. The launcher runs the bus; monitors, which load no torch,
see files alone.
"""
