"""`ResilienceCallback` and the trainer that it is in: real trainers, nothing is trained."""

import pickle
import signal
from types import MethodType, SimpleNamespace

import pytest
from adapter_frameworks import require

from resilience_sdk.adapters.transformers import ResilienceCallback, surroundings, trainers
from resilience_sdk.errors import ConfigError

pytestmark = pytest.mark.slow  # the import of Transformers alone takes seconds


@pytest.fixture(scope="module")
def transformers():
    """Transformers, with what its Trainer needs."""
    require("transformers", "transformers accelerate")
    require("accelerate")
    import transformers

    return transformers


@pytest.fixture
def make(transformers, tmp_path):
    """Return what makes a trainer with these callbacks and arguments."""

    def make(*callbacks, **options):
        import torch

        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True, **options
        )
        return transformers.Trainer(torch.nn.Linear(1, 1), args, callbacks=list(callbacks))

    return make


def test_it_is_a_callback_of_transformers(transformers):
    """Though the module imports nothing of it."""
    assert isinstance(ResilienceCallback(), transformers.TrainerCallback)


def test_a_wrong_option_is_an_error_at_once():
    """Not hours later, at the first train()."""
    with pytest.raises(ConfigError, match="heartbeat_timeout"):
        ResilienceCallback(heartbeat_timout=5)


def test_given_to_a_trainer_it_knows_it(make):
    """From the constructor on, before anything is loaded."""
    callback = ResilienceCallback()
    trainer = make(callback)
    assert callback._trainer is trainer
    assert "train" in vars(trainer)


def test_detached_it_leaves_the_trainer_as_it_was(make):
    """It may be repeated, and the callback be given to another trainer."""
    callback = ResilienceCallback()
    trainer = make(callback)
    callback.detach()
    callback.detach()
    assert "train" not in vars(trainer)
    assert callback not in trainer.callback_handler.callbacks
    callback.attach(make())


def test_what_others_have_put_around_train_stays(make):
    """Before it and behind it."""

    def before(*_):
        return "before"

    def behind():
        return watched()

    trainer = make()
    trainer.train = before
    callback = ResilienceCallback()
    callback.attach(trainer)
    callback.detach()
    assert trainer.train is before
    callback.attach(trainer)
    watched, trainer.train = trainer.train, behind
    callback.detach()
    assert trainer.train is behind
    assert trainer.train() == "before"


def test_attached_twice_to_one_trainer_is_attached_once(make):
    """A notebook's cell may run again."""
    callback = ResilienceCallback()
    trainer = make(callback)
    train = trainer.train
    callback.attach(trainer)
    assert trainer.train is train
    assert trainer.callback_handler.callbacks.count(callback) == 1


def test_two_of_ours_in_one_trainer_are_an_error(make):
    """Whichever way the second one comes."""
    with pytest.raises(ConfigError, match="remove one"):
        make(ResilienceCallback(), ResilienceCallback())
    trainer = make(ResilienceCallback())
    with pytest.raises(ConfigError, match="remove one"):
        ResilienceCallback().attach(trainer)
    late = ResilienceCallback()
    trainer.add_callback(late)
    with pytest.raises(ConfigError, match="remove one"):
        MethodType(begin_training, trainer)()


def begin_training(self):
    """Call what `train` calls, as a method of the trainer does."""
    self.callback_handler.on_train_begin(self.args, self.state, self.control)


def test_one_in_two_trainers_is_an_error(make):
    """Each trainer needs its own."""
    callback = ResilienceCallback()
    first = make(callback)
    with pytest.raises(ConfigError, match="one for each"):
        make(callback)
    assert callback._trainer is first


def test_added_to_a_trainer_that_was_made_before_it_asks_to_be_attached(make):
    """What is resumed is loaded before any hook."""
    trainer = make()
    trainer.add_callback(ResilienceCallback())
    with pytest.raises(ConfigError, match=r"callback\.attach\(trainer\) before trainer\.train"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_added_to_a_trainer_that_trains_is_an_error(make):
    """At the next step."""
    trainer = make()
    trainer.add_callback(ResilienceCallback())
    with pytest.raises(ConfigError, match="trains already: add it before"):
        trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)


def test_what_is_no_trainer_is_an_error_that_names_it():
    """And says what to use instead."""
    with pytest.raises(ConfigError, match=r"attach\(5\): expected a transformers\.Trainer.*adapters\.pytorch"):
        ResilienceCallback().attach(5)


def test_a_trainer_without_a_seam_is_an_error_that_names_it(make):
    """Such as one of a version before."""
    old = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]), args=None, train=print)
    with pytest.raises(ConfigError, match=r"SimpleNamespace has no get_batch_samples\(\).*pip install"):
        ResilienceCallback().attach(old)


def test_switched_off_the_trainer_is_left_alone(make, monkeypatch):
    """Nothing hangs on it, and train() is its own."""
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    trainer = make(ResilienceCallback())
    assert "train" not in vars(trainer)


def test_a_copy_goes_to_another_process_without_a_training(make):
    """As a search over several processes sends it."""
    callback = pickle.loads(pickle.dumps(ResilienceCallback("runs/a", resume=False)))
    assert isinstance(callback, ResilienceCallback)
    assert (callback._run_dir, callback._resumes, callback._training) == ("runs/a", False, None)


def test_the_optimizer_is_the_one_that_steps(make):
    """Inside of whatever is around it."""
    import torch

    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert trainers.torch_optimizer(SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))) is inner
    assert trainers.torch_optimizer(SimpleNamespace(optimizer=object())) is None


def test_what_does_not_go_together_is_said(make, capsys):
    """Transformers' own handler of SIGTERM, and checkpoints without an optimizer; each with what to do."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = make(enable_jit_checkpoint=True, save_only_model=True)
        assert signal.getsignal(signal.SIGTERM) != before
        surroundings.warn(trainer)
        assert surroundings.handlers_before(trainer) == {signal.SIGTERM: before}
    finally:
        signal.signal(signal.SIGTERM, before)
    jit, only_model = capsys.readouterr().err.splitlines()
    assert "enable_jit_checkpoint=True" in jit
    assert "leave it out" in jit
    assert "save_only_model=True" in only_model
