"""What the Accelerate adapter is made of, without Accelerate: names, the state file, what a tracker journals."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk import straggler
from resilience_sdk.adapters.accelerate.numbered import in_order, number_of, to_remove
from resilience_sdk.adapters.accelerate.own_saves import newest
from resilience_sdk.adapters.accelerate.prepared import find_prepared
from resilience_sdk.adapters.accelerate.states import FILE, read_file
from resilience_sdk.adapters.accelerate.tracking import Tracking, plain
from resilience_sdk.adapters.accelerate.whole import UNFINISHED
from resilience_sdk.errors import CheckpointError, ConfigError
from resilience_sdk.straggler.reports import Report

# -- numbered directories


@given(st.lists(st.integers(0, 200), unique=True), st.one_of(st.none(), st.integers(0, 5)))
def test_the_newest_are_kept(numbers, limit):
    """As many as the limit says, never none, and nothing that is not numbered is removed."""
    names = [*(f"checkpoint_{number}" for number in numbers), "best", "checkpoint_last"]
    removed = to_remove(names, limit)
    kept = sorted(set(numbers) - {number_of(name) for name in removed})
    expected = sorted(numbers) if limit is None else sorted(numbers)[-max(limit, 1) :]
    assert kept == expected


def test_order_is_that_of_the_numbers():
    """Not of the letters."""
    assert in_order(["checkpoint_10", "checkpoint_9", "x"]) == ["checkpoint_9", "checkpoint_10"]


def test_a_half_written_one_is_passed_over(tmp_path, capsys):
    """And it is said which."""
    for number in (1, 2):
        (tmp_path / f"checkpoint_{number}").mkdir()
    (tmp_path / "checkpoint_2" / UNFINISHED).touch()
    assert newest(tmp_path) == "checkpoint_1"
    assert "checkpoint_2 is half written" in capsys.readouterr().err
    assert newest(tmp_path / "none") is None


# -- the file of ours


def test_a_directory_without_it_is_of_a_run_without_us(tmp_path):
    """That is no error."""
    assert read_file(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"v": 2, "step": 1}', '{"v": 1, "step": "x"}'])
def test_a_damaged_one_is_an_error_with_a_cure(tmp_path, text):
    """It is not taken for a run without us: the place would be lost without a word."""
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="remove it"):
        read_file(tmp_path)


def test_it_is_read(tmp_path):
    """As it was written."""
    (tmp_path / FILE).write_text(json.dumps({"v": 1, "step": 5, "position": None}))
    assert read_file(tmp_path)["step"] == 5


# -- wrong use


class Accelerator:
    """What the adapter looks for in an accelerator."""

    distributed_type = "NO"
    project_configuration = state = None

    def __init__(self, models=(), optimizers=(), loaders=()):
        self._models, self._optimizers, self._dataloaders = list(models), list(optimizers), list(loaders)

    def save_state(self): ...

    def load_state(self): ...


@attrs.frozen(eq=False)
class Model:
    own: tuple

    def parameters(self):
        return iter(self.own)


@attrs.frozen(eq=False)
class Optimizer:
    own: tuple

    @property
    def param_groups(self):
        return [{"params": list(self.own)}]


def find(accelerator, env=None, **named):
    return find_prepared(accelerator, **named, env=env or {})


def test_something_else_is_refused():
    """It names what it was given."""
    with pytest.raises(ConfigError, match=r"attach\(int\): expected the accelerate.Accelerator"):
        find(3)


def test_before_prepare_is_refused():
    """It says where to put the line."""
    with pytest.raises(ConfigError, match="no model with an optimizer yet; call attach behind"):
        find(Accelerator())


def test_an_accelerator_that_lacks_a_seam_is_refused():
    """Another version of accelerate: it names what is missing, and the cure."""
    found = Accelerator()
    del found._dataloaders
    with pytest.raises(ConfigError, match=r"has no Accelerator._dataloaders; pip install"):
        find(found)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_what_cannot_be_seen_is_refused(kind):
    """With another way to have heartbeats."""
    found = Accelerator()
    found.distributed_type = kind
    with pytest.raises(ConfigError, match=f"{kind} is not covered.*heartbeat"):
        find(found)


def test_fsdp_that_is_not_in_effect_is_refused():
    """It says what is in effect instead; with FSDP in effect all is well."""
    weight = object()
    found = Accelerator([Model((weight,))], [Optimizer((weight,))])
    found.distributed_type = "MULTI_CPU"
    with pytest.raises(ConfigError, match=r"FSDP is asked for .* MULTI_CPU is in effect"):
        find(found, {"ACCELERATE_USE_FSDP": "true"})
    assert find(found, {"ACCELERATE_USE_FSDP": "false"}).model is found._models[0]
    found.distributed_type = "FSDP"
    assert find(found, {"ACCELERATE_USE_FSDP": "true"}).model is found._models[0]


def test_the_model_is_the_one_that_is_trained():
    """Not the first one, which may be a teacher; the loader is the first."""
    first, second = object(), object()
    teacher, student = Model((first,)), Model((second,))
    found = find(Accelerator([teacher, student], [Optimizer((second,))], ["train", "eval"]))
    assert (found.model, found.loader) == (student, "train")


def test_several_optimizers_have_to_be_named():
    """Which of their steps are the progress is for the user to say."""
    one, other = Optimizer((object(),)), Optimizer((object(),))
    found = Accelerator([Model(one.own), Model(other.own)], [one, other])
    with pytest.raises(ConfigError, match="2 optimizers; name the one"):
        find(found)
    assert find(found, optimizer=other).model is found._models[1]


def test_a_loader_that_was_not_prepared_is_refused():
    """The loop does not use it."""
    weight = object()
    with pytest.raises(ConfigError, match="has returned"):
        find(Accelerator([Model((weight,))], [Optimizer((weight,))], [[1]]), loader=[1, 2])


# -- what is journalled


def test_numbers_and_texts_are_journalled():
    """A tensor would have to wait for its device, a picture has no place in a journal."""
    assert plain({"loss": 0.5, "step": 1, "run": "a", "image": object()}) == {"loss": 0.5, "step": 1, "run": "a"}


class Heard:
    """A tracker of somebody else's, a journal, and whatever else keeps what it is told."""

    def __init__(self):
        self.told = []

    def log(self, values, step=None):
        self.told.append((values, step))

    def emit(self, event, **facts):
        self.told.append((event.value, facts))


@pytest.fixture
def tracking():
    """A tracker of ours, connected as `attach` connects it; `tracking.other`, `tracking.journal`."""
    found = Tracking()
    found.other, found.journal = Heard(), Heard()

    class Session:
        journal = found.journal

    class Accelerator:
        trackers = (found, found.other)

    found.connect(Accelerator(), Session())
    return found


def test_a_new_report_goes_to_the_other_trackers(tracking, monkeypatch):
    """Once, with the step of the call that brought it, and not to our own."""
    report = Report(nodes={0: "a", 1: "a"}, section_relative={"fwd": {0: 1.0, 1: 0.5}})
    monkeypatch.setattr(straggler, "report", lambda: report)
    monkeypatch.setattr("resilience_sdk.adapters.accelerate.tracking.PERIOD_S", 0.0)
    for step in (7, 8):
        tracking.log({"loss": 0.5}, step=step)
    [(scores, step)] = tracking.other.told
    assert step == 7
    assert min(scores.values()) == 0.5
    assert all(name.startswith("stragglers/") for name in scores)
    assert len(tracking.journal.told) == 2


def test_it_journals_once_a_second_at_most(tracking):
    """Whatever a loop logs at each step."""
    for step in range(100):
        tracking.log({"loss": 0.5}, step=step)
    assert tracking.journal.told == [("metrics", {"step": 0, "what": "log", "values": {"loss": 0.5}})]


def test_before_and_after_it_does_nothing(tracking):
    """Unconnected, with the SDK switched off, and when the training has ended; a configuration is kept till then."""
    tracking.finish()
    tracking.log({"loss": 0.5})
    alone = Tracking()
    alone.store_init_configuration({"lr": 0.1})
    alone.log({"loss": 0.5})
    assert tracking.journal.told == []
    assert alone.tracker is None
