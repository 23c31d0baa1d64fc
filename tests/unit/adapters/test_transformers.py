"""`ResilienceCallback` and the trainer that it is in: real trainers, nothing is trained."""

import pickle
import signal
from types import MethodType, SimpleNamespace

import pytest
import torch
from adapter_frameworks import require

from resilience_sdk.adapters.transformers import ResilienceCallback
from resilience_sdk.adapters.transformers.seams import handlers_before, torch_optimizer, warn
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
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True, **options
        )
        return transformers.Trainer(torch.nn.Linear(1, 1), args, callbacks=list(callbacks))

    return make


def test_given_to_a_trainer_it_knows_it_once(make, transformers):
    """From the constructor on, before anything is loaded; a notebook's cell may attach it again."""
    callback = ResilienceCallback()
    assert isinstance(callback, transformers.TrainerCallback)
    trainer = make(callback)
    train = vars(trainer)["train"]
    callback.attach(trainer)
    assert callback._trainer is trainer
    assert trainer.train is train
    assert trainer.callback_handler.callbacks.count(callback) == 1


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


def test_a_wrong_option_is_an_error_at_once():
    """Not hours later, at the first train()."""
    with pytest.raises(ConfigError, match="heartbeat_timeout"):
        ResilienceCallback(heartbeat_timout=5)


def begin_training(self):
    """Call what `train` calls, as a method of the trainer does."""
    self.callback_handler.on_train_begin(self.args, self.state, self.control)


def test_two_of_ours_in_one_trainer_are_an_error(make):
    """Whichever way the second one comes; and so is one in two trainers."""
    callback = ResilienceCallback()
    with pytest.raises(ConfigError, match="remove one"):
        make(callback, ResilienceCallback())
    callback.detach()
    trainer = make(callback)
    with pytest.raises(ConfigError, match="remove one"):
        ResilienceCallback().attach(trainer)
    trainer.add_callback(ResilienceCallback())
    with pytest.raises(ConfigError, match="remove one"):
        MethodType(begin_training, trainer)()
    with pytest.raises(ConfigError, match="one for each"):
        make(callback)
    assert callback._trainer is trainer


@pytest.mark.parametrize(
    ("hook", "cure"),
    [
        ("on_train_begin", r"callback\.attach\(trainer\) before trainer\.train"),
        ("on_step_begin", "trains already: add it before"),
    ],
)
def test_added_to_a_trainer_that_was_made_before_it_asks_to_be_attached(make, hook, cure):
    """What is resumed is loaded before any hook; added while it trains, it is an error at the next step."""
    trainer = make()
    trainer.add_callback(ResilienceCallback())
    with pytest.raises(ConfigError, match=cure):
        getattr(trainer.callback_handler, hook)(trainer.args, trainer.state, trainer.control)


OLD = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]), args=None, train=print, training_step=print)


@pytest.mark.parametrize(
    ("trainer", "cure"),
    [
        (5, r"attach\(5\): expected a transformers\.Trainer.*adapters\.pytorch"),
        (OLD, r"SimpleNamespace has no get_batch_samples\(\).*pip install"),
    ],
)
def test_what_is_no_trainer_or_an_old_one_is_an_error_that_names_it(transformers, trainer, cure):
    """And says what to use instead."""
    with pytest.raises(ConfigError, match=cure):
        ResilienceCallback().attach(trainer)


def test_a_copy_goes_to_another_process_without_a_training(transformers):
    """As a search over several processes sends it."""
    callback = pickle.loads(pickle.dumps(ResilienceCallback("runs/a", resume=False)))
    assert isinstance(callback, ResilienceCallback)
    assert (callback._options.run_dir, callback._resumes, callback._training) == ("runs/a", False, None)


def test_the_optimizer_is_the_one_that_steps():
    """Inside of whatever is around it."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert torch_optimizer(SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))) is inner
    assert torch_optimizer(SimpleNamespace(optimizer=object())) is None


def test_what_does_not_go_together_is_said(make, capsys):
    """Transformers' own handler of SIGTERM, and checkpoints without an optimizer; each with what to do."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = make(enable_jit_checkpoint=True, save_only_model=True)
        assert signal.getsignal(signal.SIGTERM) != before
        warn(trainer)
        assert handlers_before(trainer) == {signal.SIGTERM: before}
    finally:
        signal.signal(signal.SIGTERM, before)
    jit, only_model = capsys.readouterr().err.splitlines()
    assert "enable_jit_checkpoint=True" in jit
    assert "leave it out" in jit
    assert "save_only_model=True" in only_model
