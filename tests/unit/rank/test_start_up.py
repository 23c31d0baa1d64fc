"""From when on a rank counts as one that will make a step, so that a start-up that gets stuck can be judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
def show():
    import json
    from resilience_sdk.recorder.page_reader import PageReader
    from resilience_sdk.rank import current
    session = current()
    if session is None:
        print("null")
        return
    page = PageReader(session.page.path).snapshot()
    print(json.dumps({"declared": page.declared, "trains": page.trains, "beats": page.beats}))
"""
MODEL = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
AROUND = """
from resilience_sdk.adapters import megatron

def pretrain(forward_step_func, model_provider):
    show()  # as in the set-up of Megatron, before it calls anything of the script

megatron.around(pretrain)(lambda: None, lambda: None)
"""
ATTACH_MEGATRON = """
import types
from resilience_sdk.adapters import megatron
megatron.attach(types.SimpleNamespace(timers=None))
show()
"""
WAYS = {
    "heartbeat": "from resilience_sdk import heartbeat\nwith heartbeat():\n    show()",
    "resilient": "import resilience_sdk\n@resilience_sdk.resilient\ndef step():\n    show()\nstep()",
    "section": "from resilience_sdk import straggler\nwith straggler.section('data'):\n    show()",
    "check": "from resilience_sdk import preemption\npreemption.check()\nshow()",
    "straggler.attach": f"{MODEL}\nfrom resilience_sdk import straggler\nh = straggler.attach(model)\nshow()",
    "start_run": "import resilience_sdk\nrun = resilience_sdk.start_run()\nshow()",
    "adapters.pytorch": f"{MODEL}\nfrom resilience_sdk.adapters import pytorch\n"
    "h = pytorch.attach(model, optimizer)\nshow()",
    "adapters.megatron.attach": ATTACH_MEGATRON,
    "adapters.megatron.around": AROUND,
}
# Adapters of Lightning, Accelerate and Transformers: tests/integration/adapters_contract.


def shown(folder: Path, script: str, *command: str, **env: str) -> list[dict[str, object] | None]:
    """Run a script that shows its page, and return what it showed."""
    (folder / "pages").mkdir(exist_ok=True)
    (folder / "train.py").write_text(SHOW + script)
    places = {"RESILIENCE_PAGE_DIR": str(folder / "pages"), "RESILIENCE_RUN_DIR": str(folder / "run")}
    done = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **places, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_declares_before_the_first_step(tmp_path, way):
    """The page promises a first beat from the first call on, also where that only prepares the training."""
    (page,) = shown(tmp_path, WAYS[way])
    assert page is not None, "no page"
    assert (page["declared"], page["beats"]) == (True, 0)


def test_an_import_and_a_decorator_declare_nothing(tmp_path):
    """Modules are shared with programs that are no ranks, such as DataLoader workers and servers."""
    script = "import resilience_sdk\nfrom resilience_sdk import heartbeat\n@heartbeat()\ndef step(): pass\nshow()"
    assert shown(tmp_path, script) == [None]
    (page,) = shown(tmp_path, script, "-m", "resilience_sdk.auto")
    assert page == {"declared": False, "trains": False, "beats": 0}


TOLD_APART = f"""
import time
from resilience_sdk.rank import current

def wait_for(trains):
    until = time.monotonic() + 20
    while current()._trains != trains and time.monotonic() < until:
        time.sleep(0.01)

import torch
current()._tick()  # what the helper thread does every 2 s
show()
{MODEL}
wait_for(True)
show()
optimizer.step()
show()
"""


def test_an_unchanged_script_is_a_training_once_it_has_an_optimizer(tmp_path):
    """It promises nothing: without an optimizer it may as well be a server that waits for hours."""
    assert shown(tmp_path, TOLD_APART, "-m", "resilience_sdk.auto") == [
        {"declared": False, "trains": False, "beats": 0},
        {"declared": False, "trains": True, "beats": 0},
        {"declared": False, "trains": True, "beats": 1},
    ]


CHECKS_ALONE = f"""
{MODEL}
from resilience_sdk import heartbeat, preemption
for _ in range(3):
    preemption.check()
    optimizer.step()
show()
with heartbeat():
    pass
optimizer.step()
show()
"""


def test_where_the_code_only_checks_the_steps_of_the_optimizer_are_progress(tmp_path):
    """Under any launcher: else such a training would never have begun. Beats of its own replace them."""
    counts = [page["beats"] for page in shown(tmp_path, CHECKS_ALONE) if page is not None]
    assert counts == [3, 1]


IN_TURN = f"""
{MODEL}
other, third = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
for _ in range(4):
    optimizer.step()
    other.step()
show()
for _ in range(3):  # another phase, with another optimizer
    third.step()
show()
"""


def test_optimizers_that_step_in_turn_make_one_step_of_the_loop(tmp_path):
    """As of a GAN, or with one for each kind of parameters. Another phase of the training goes on."""
    assert [page["beats"] for page in shown(tmp_path, IN_TURN, "-m", "resilience_sdk.auto") if page] == [4, 6]
