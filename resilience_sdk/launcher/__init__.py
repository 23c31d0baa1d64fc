"""Launcher: `resilience run`, torch's elastic agent with workers, restarts and decisions of our own.

In come a command line, signals and the ends of ranks; out go attempts, restarts and one exit code. `main` prepares,
`job` runs attempt after attempt, `agent` and `rendezvous` bring the nodes together, `attempt` watches one attempt,
`restart_policy` alone decides what follows it; `postmortem/` writes down why it ended. `signals` is
where a SIGTERM to the launcher arrives; `forkserver`, `forkserver_main` and `worker` start the ranks. `supervise` and
`requeue_policy` run whole jobs again.
"""
