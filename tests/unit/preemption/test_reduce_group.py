"""The gloo group of the stop, as far as one process can see it; `tests/integration` has real jobs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from resilience_sdk.preemption import reduce


def test_without_torch_distributed_there_is_no_group_and_torch_is_not_imported():
    """`check()` asks for it again and again until there is a process group."""
    program = (
        "import sys; from resilience_sdk.preemption import reduce; print(reduce.connect(0), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "None False\n", done.stderr


def test_a_store_that_does_not_answer_is_left_behind(monkeypatch):
    """Torch waits without bound on a dead link; the thread that trains does not."""
    monkeypatch.setattr(reduce, "_STORE_S", 0.05)
    released = threading.Event()
    with pytest.raises(RuntimeError, match="not answered"):
        reduce._bounded(released.wait)
    released.set()


def test_what_the_store_answers_or_raises_is_handed_over():
    """Another thread asks, the caller sees no difference."""

    def fail():
        raise RuntimeError("connection reset by peer")

    assert reduce._bounded(lambda: 7) == 7
    with pytest.raises(RuntimeError, match="reset by peer"):
        reduce._bounded(fail)


def test_its_thread_is_waited_for_at_the_exit_though_the_script_has_no_group_any_more():
    """Else one that comes too late for the interpreter aborts a rank whose training is over."""
    program = (
        "import torch.distributed as dist\n"
        "from resilience_sdk.system import gloo_teardown\n"
        "group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)\n"
        "while not gloo_teardown._threads():\n"  # a thread has its name a moment after it began
        "    pass\n"
        "print(dist.is_initialized())\n"
        "gloo_teardown.settle_at_exit()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
