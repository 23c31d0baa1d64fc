"""History: an index over the journals of many runs, and what it answers: what recurs, which node, what came before.

In come run directories (`indexer` reads what is new in their journals, `facts` says which rows an event makes);
`schema` has the tables, in SQLite or PostgreSQL. Out come answers: `questions` asks, `suspects` says which nodes are.
The index is derived from the journals: it can be thrown away, and is made again when its schema changes.
"""
