"""Command line: the `resilience` command, one module per subcommand, imported when it is asked for.

`main` finds it and turns errors of ours into one line and exit code 2. The reading commands look at a run directory
alone; `report` says what is in it.
"""
