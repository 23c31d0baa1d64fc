"""Core: what every process of the SDK shares, without torch.

In come the environment, configuration files and the run directory; out go values: settings, the configuration of a job,
events, leases. `settings/` decides what an option means and where it comes from, `environ` is the one reader of
the environment, `run_directory` the one place of every path below RUN_DIR, `journal` the vocabulary of events, their
only writer and reader, `lease` decides who may use a run directory, `job_config` holds what the processes of one job
on one node agree on. `redaction` stands before everything that is written, `console` before everything that is shown.
"""
