"""When workers must be exec'd, and what the server without a preload does with its orders."""

import os
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from resilience_sdk.launcher.forkserver import ForkServer, WorkerStarter, load_time_part, needs_exec
from resilience_sdk.launcher.forkserver_main import import_all
from resilience_sdk.launcher.forkserver_wire import Order, Script
from resilience_sdk.launcher.signals import SignalInbox

SCRIPT = Script("file", "train.py")
READ_AT_LOAD = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_LOGS",
    "TORCH_DISTRIBUTED_DEBUG",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONHASHSEED",
]
READ_LATER = [
    "RANK",
    "LOCAL_RANK",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "RESILIENCE_INTERNAL_ATTEMPT",
    "NCCL_DEBUG",
    "HOME",
    "PATH",
]


def test_what_is_not_installed_is_not_missed(tmp_path, monkeypatch):
    """A rank that wants it says so itself; what is there and cannot be imported is told at once."""
    (tmp_path / "cannot_be_imported.py").write_text("import is_not_installed_either")
    (tmp_path / "fails_at_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    failed = import_all(["is_not_installed", "cannot_be_imported", "fails_at_import", "json"])
    assert failed == (
        "cannot_be_imported: ModuleNotFoundError: No module named 'is_not_installed_either'",
        "fails_at_import: ZeroDivisionError: division by zero",
    )


@pytest.mark.parametrize("name", READ_AT_LOAD)
def test_a_load_time_variable_that_differs_needs_exec(name):
    """The reason names the variable; an unset one differs from a set one."""
    assert name in needs_exec([{name: "1"}, {name: "2"}], script=SCRIPT)
    assert name in needs_exec([{}, {name: "2"}], script=SCRIPT)
    assert needs_exec([{name: "1"}, {name: "1"}], script=SCRIPT) is None


@given(st.lists(st.dictionaries(st.sampled_from(READ_LATER), st.text(max_size=3)), max_size=4))
def test_other_variables_may_differ(envs):
    """What is read when it is used can be given to a forked worker."""
    assert needs_exec(envs, script=SCRIPT) is None
    assert not any(load_time_part(env) for env in envs)


def test_options_that_need_exec_say_so():
    """Each reason is one that a person can act on."""
    assert "--start-method" in needs_exec([], script=SCRIPT, start_method="exec")
    assert "--no-python" in needs_exec([], script=Script("binary", "sh"))
    assert "--numa-binding" in needs_exec([], script=SCRIPT, numa_binding=True)


@pytest.fixture
def server():
    """A server that executes; it preloads nothing and starts at once."""
    server = ForkServer(mode="exec")
    server.start(os.environ, SCRIPT)
    yield server
    server.close()


def order(number, folder, *command, **env):
    """An order whose output goes to files named after its number."""
    return Order(
        number,
        SCRIPT,
        {"PATH": os.environ["PATH"], **env},
        str(folder),
        str(folder / f"{number}.out"),
        str(folder / f"{number}.err"),
        command,
    )


def exits(server, count):
    """Collect `count` exits by order number."""
    found = {}
    while len(found) < count:
        new = server.exits(20.0)
        assert new
        found.update({end.number: end for end in new})
    return found


def test_commands_end_with_their_codes_and_output(server, tmp_path):
    """Environment, working directory and redirects are the order's; signals come back negative."""
    script = "echo $A $PWD; kill -9 $$"
    pids = server.launch(
        [
            order(0, tmp_path, "sh", "-c", "exit 3"),
            order(1, tmp_path, "sh", "-c", script, A="x y"),
            order(2, tmp_path, "absent"),
        ]
    )
    ends = exits(server, 3)
    assert {number: end.code for number, end in ends.items()} == {0: 3, 1: -9, 2: 127}
    assert {number: end.pid for number, end in ends.items()} == pids
    assert (tmp_path / "1.out").read_text() == f"x y {tmp_path}\n"
    assert "absent" in (tmp_path / "2.err").read_text()


def test_a_worker_leads_its_session_and_has_clean_signals(server, tmp_path):
    """As torch's own workers: own session, nothing blocked or ignored, three descriptors."""
    program = """
import os, signal
print(os.getsid(0) == os.getpid() == os.getpgid(0), signal.pthread_sigmask(0, []))
print(signal.getsignal(signal.SIGCHLD).name, len(os.listdir("/proc/self/fd")))
"""
    server.launch([order(0, tmp_path, sys.executable, "-c", program)])
    exits(server, 1)
    assert (tmp_path / "0.out").read_text() == "True set()\nSIG_DFL 4\n"


def test_signals_meant_for_the_job_do_not_end_the_server(server, tmp_path):
    """scancel and pkill reach every process; the ranks need their time, so the server must stay."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(server._process.pid, signum)
    server.launch([order(0, tmp_path, "true")])
    assert exits(server, 1)[0].code == 0


def test_the_loss_of_the_server_is_an_exit_of_its_workers(server, tmp_path):
    """The kernel kills them; the launcher says so instead of waiting, and kills what they started."""
    (pid,) = server.launch([order(0, tmp_path, "sh", "-c", "sleep 100 & wait")]).values()
    os.kill(server._process.pid, signal.SIGKILL)
    end = exits(server, 1)[0]
    assert (end.pid, end.code, end.server_lost) == (pid, -9, True)
    assert not server.alive
    with pytest.raises(RuntimeError, match="lost while it started workers"):
        server.launch([order(1, tmp_path, "true")])


def test_an_interpreter_that_ends_at_once_is_a_problem(tmp_path):
    """A server that cannot start is reported, not waited for."""
    server = ForkServer(mode="fork")
    server.start({**os.environ, "PYTHON_EXEC": "/bin/false"}, SCRIPT)
    assert "exit code 1" in server.ready().problem
    server.close()


def test_prepare_does_nothing_where_workers_are_executed():
    """No server is preloaded in vain."""
    starter = WorkerStarter(SCRIPT, start_method="exec")
    starter.prepare(os.environ)
    assert starter._server is None
    starter.close()


def test_a_signal_while_ranks_are_started_is_a_request_and_raises_nothing(tmp_path, monkeypatch):
    """torch's handlers raise out of the start, with the ranks left behind; ours are back before the first order."""
    starter = WorkerStarter(Script("binary", "true"), start_method="exec")
    launch = ForkServer.launch

    def told_to_leave(server, orders):
        os.kill(os.getpid(), signal.SIGTERM)
        return launch(server, orders)

    monkeypatch.setattr(ForkServer, "launch", told_to_leave)
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    with SignalInbox(["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]) as inbox:  # all that torch takes: put back at the end
        with starter.serving_elastic(inbox):
            logs = DefaultLogsSpecs(log_dir=str(tmp_path))
            workers = local_elastic_agent.start_processes("test", "true", {0: ()}, {0: env}, logs)
        assert inbox.arrived == [signal.SIGTERM]
    assert workers.pids()
    workers.close()
    starter.close()
