"""The report of a run: what its files tell, for every page and screen that shows it.

In comes a run directory; `run_state` is what its journal and its living ranks say, `outcome` how its last job ended,
`why_page` what a person reads of an incident. `cli` prints it.
"""
