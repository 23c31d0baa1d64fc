"""What holds a process that does not end, from its frames, threads and children."""

import pytest

from resilience_sdk.hang.unended import Held, HeldThread, holder

_JOIN = ("/usr/lib/python3.11/threading.py:1590 _shutdown",)
_LOADER = HeldThread("loader", ("/usr/lib/python3.11/queue.py:171 get", "/home/me/train.py:12 fill"))


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (Held(_JOIN, (_LOADER,)), "its thread 'loader' at train.py:12 in fill has not ended; Python waits for it"),
        (Held(_JOIN), "a thread that is no daemon has not ended"),
        (Held(_JOIN, (_LOADER, _LOADER)), "have not ended; Python waits for them because they are no daemons"),
        (
            Held(
                (
                    "/site-packages/torch/distributed/distributed_c10d.py:2150 destroy_process_group",
                    "/home/me/train.py:40 main",
                ),
                (_LOADER,),
            ),
            "it is in destroy_process_group, which waits for the other ranks at train.py:40 in main",
        ),
        (
            Held(("/lib/python3.11/multiprocessing/util.py:360 _exit_function",), children={7: "python upload.py"}),
            "it waits for its child process 7 (python upload.py)",
        ),
        (
            Held(("/lib/python3.11/subprocess.py:1264 wait", "/home/me/train.py:8 finish"), children={7: "a", 8: "b"}),
            "it waits for its children process 7 (a), process 8 (b) at train.py:8 in finish",
        ),
        (Held(("/home/me/train.py:30 upload",), (_LOADER,)), "an at-exit function has not returned at train.py:30"),
        (Held(("/site-packages/wandb/sdk.py:9 finish",)), "what Python does at exit has not returned at sdk.py:9"),
        (Held(children={7: "sleep 9"}), "it waits for its child process 7 (sleep 9), or native code has not returned"),
        (Held(), "Python has ended, and native code"),
        (Held(is_known=False), "what holds it could not be seen"),
    ],
)
def test_who_holds_it(held, said):
    """As the order of Python's shutdown tells: threads, at-exit functions, children, native code."""
    assert said in holder(held)


def test_of_many_threads_some_are_named():
    """And the others counted."""
    assert "and 4 more have not ended" in holder(Held(_JOIN, (_LOADER,) * 7))
