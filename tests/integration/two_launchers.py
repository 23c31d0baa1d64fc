"""Two launchers on this machine as the two nodes of a job."""

import contextlib
import socket

from harness import job


@contextlib.contextmanager
def two_launchers(folder, *words, ranks=1, nnodes="2", store_on=None, conf=(), **env):
    """Start `words`, further options and a script, with `ranks` ranks on each of two nodes; yield both launchers.

    They share the run directory `folder/run` and the scripts' TOLD, `folder/told`. `store_on`: the node that has the
    store of the rendezvous, else whichever comes first; `conf`: more of `--rdzv-conf`.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    told, run_dir = folder / "told", folder / "run"
    told.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        nodes = []
        for node in (0, 1):
            own = folder / f"node{node}"
            own.mkdir()
            host = () if store_on is None else (f"is_host={int(node == store_on)}",)
            started = job(
                own,
                *("--run-dir", str(run_dir), "--nnodes", nnodes, "--node-rank", str(node)),
                *("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "two"),
                *("--rdzv-endpoint", f"localhost:{port}"),
                *(("--rdzv-conf", ",".join((*host, *conf))) if host or conf else ()),
                *words,
                env={"TOLD": str(told), **env},
            )
            nodes.append(stack.enter_context(started))
            nodes[-1].run_dir = run_dir
        yield nodes
