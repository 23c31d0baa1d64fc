"""Deterministic faults: what is planned, when it is due, and that it is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk import faults
from resilience_sdk.errors import ConfigError
from resilience_sdk.faults import InjectedError, Injector, Plan, parse

KILL = "kill:how=exception"


def loaded(text: str, rank: int = 0, attempt: int = 0) -> Injector:
    """Return an injector of one rank."""
    injector = Injector()
    injector.load(text, rank, attempt)
    return injector


def strikes(injector: Injector, name: str = "step", step: int = 0, *, where: str = "inside") -> bool:
    """Tell whether an exception is thrown at this moment."""
    try:
        injector.meet(where, name, step, name == "step")
    except InjectedError:
        return True
    return False


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Injector:
    """Give the module's functions an injector that other tests do not see."""
    injector = Injector()
    monkeypatch.setattr(faults, "_injector", injector)
    return injector


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hag:rank=1", "unknown kind 'hag'; did you mean 'hang'"),
        ("hang:rnk=1", "unknown key 'rnk'; did you mean 'rank'"),
        ("hang:rank=one", "rank=one is not right: it takes a whole number"),
        ("hang:rank=-1", "rank=-1"),
        ("hang:how=slep", "how=slep is not known; did you mean 'sleep'"),
        ("hang:where=beginning", "where=beginning is not known; known: inside, outside, start, save"),
        ("hang:rank", "'rank' is not key=value"),
        ("hang:seconds=3", "unknown key 'seconds'"),
        ("slow:rank=1", "slow needs seconds="),
        ("slow:seconds=nan", "seconds=nan is not right"),
        ("slow:seconds=inf", "seconds=inf is not right"),
        ("kill:code=3", "code=3 needs how=exit"),
        ("preempt:how=sigterm", "unknown key 'how'"),
        ("preempt:to=all", "to=all is not known; known: rank, job"),
        ("pause:rank=1", "pause needs seconds="),
        ("hang-gil:how=c", "hang-gil is hang with how=gil already"),
        ("hang:where=save", "where=save needs kill with how=sigkill"),
        ("exit:where=save", "where=save needs kill with how=sigkill"),
        ("corrupt:rank=1", "unknown kind 'corrupt'; did you mean 'corrupt-checkpoint'"),
    ],
)
def test_a_bad_plan_is_refused_with_its_text_and_the_cure(text: str, complaint: str) -> None:
    """Whoever mistypes a fault must not wait for one that never comes."""
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert complaint in str(error.value)
    assert text in str(error.value)


def test_several_plans_are_separated_by_semicolons() -> None:
    """Spaces and a last semicolon do no harm."""
    assert parse(" hang:rank=1, step=40 ; slow:seconds=.5; ") == [
        Plan("hang", "sleep", rank=1, step=40),
        Plan("slow", seconds=0.5),
    ]


@given(
    st.builds(
        Plan,
        kind=st.just("hang"),
        how=st.sampled_from(["sleep", "c", "gil", "stop"]),
        rank=st.none() | st.integers(0, 9),
        step=st.none() | st.integers(0, 9),
        attempt=st.none() | st.integers(0, 9),
        section=st.none() | st.sampled_from(["fwd", "data"]),
        where=st.sampled_from(["inside", "outside"]),
    )
)
def test_a_plan_reads_back_from_its_own_text(plan: Plan) -> None:
    """What the console and the incident show can be used again as it stands."""
    assert parse(str(plan)) == [plan]


def test_short_words_are_kinds_with_their_way() -> None:
    """As `resilience rehearse` names them."""
    assert parse("hang-gil:rank=1;exit:code=3;exception") == [
        Plan("hang", "gil", rank=1),
        Plan("kill", "exit", code=3),
        Plan("kill", "exception"),
    ]


def test_it_strikes_the_rank_the_step_and_the_attempt_that_are_named() -> None:
    """All others go on."""
    text = f"{KILL},rank=1,step=4"
    assert strikes(loaded(text, rank=1), step=4)
    assert not strikes(loaded(text, rank=1), step=3)
    assert not strikes(loaded(text, rank=0), step=4)
    assert not strikes(loaded(text, rank=1, attempt=1), step=4)
    assert strikes(loaded(f"{text},attempt=any", rank=1, attempt=1), step=4)


def test_only_what_concerns_this_process_arms_it() -> None:
    """A process that is not meant pays nothing."""
    assert loaded(f"{KILL},rank=1", rank=1).armed()
    assert not loaded(f"{KILL},rank=1", rank=0).armed()
    assert not loaded(f"{KILL},rank=1", rank=1, attempt=2).armed()
    assert not loaded("").armed()


def test_a_section_a_heartbeat_and_their_outside_are_different_moments() -> None:
    """Without a section it is the heartbeat; `outside` is after it; `start` is before the first."""
    assert not strikes(loaded(KILL), "fwd")
    assert strikes(loaded(f"{KILL},section=fwd"), "fwd")
    assert not strikes(loaded(f"{KILL},section=fwd"), "step")
    assert not strikes(loaded(f"{KILL},where=outside"))
    assert strikes(loaded(f"{KILL},where=outside"), where="outside")
    assert strikes(loaded(f"{KILL},where=start,step=7"), step=-1, where="start")


def test_it_strikes_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A user who catches the exception and tries the step again gets through, also after a second load."""
    injector = loaded(KILL)
    assert strikes(injector)
    injector.load(KILL, 0, 0)
    assert not strikes(injector)
    assert not injector.armed()
    assert capsys.readouterr().err.count("injected fault: kill:how=exception") == 1


def test_who_is_to_note_a_fault_hears_of_it_before_it_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each plan, with how it was given and the step; at the start there is no step."""
    heard: list[tuple[str, int | None]] = []
    monkeypatch.setattr(faults, "on_strike", lambda given_by, step: heard.append((given_by, step)))
    injector = loaded(f"{KILL},rank=0,step=4;{KILL},where=start;slow:seconds=0,step=5")
    injector.add(parse(f"{KILL},step=6")[0])
    assert strikes(injector, where="start", step=-1)
    assert [strikes(injector, step=step) for step in (3, 4, 5, 6, 7)] == [False, True, False, True, False]
    assert heard == [
        (f"RESILIENCE_FAULT={KILL},where=start", None),
        (f"RESILIENCE_FAULT={KILL},rank=0,step=4", 4),
        ("RESILIENCE_FAULT=slow:step=5,seconds=0.0", 5),
        (f"faults.inject() as {KILL},step=6", 6),
    ]


def test_preempt_is_the_signal_of_a_scheduler() -> None:
    """Whoever handles SIGTERM hears it, once, and goes on."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        injector = loaded("preempt:step=4")
        for step in (3, 4, 4, 5):
            injector.meet("inside", "step", step, True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_preempt_of_the_job_is_sent_to_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which passes it on to all ranks, as it does with a scheduler's."""
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        monkeypatch.setattr(faults, "find_process", {"launcher": launcher.pid}.get)
        loaded("preempt:to=job").meet("inside", "step", 0, True)
        assert launcher.wait(timeout=30) == -signal.SIGTERM
    finally:
        launcher.kill()
        launcher.wait()


def test_a_killed_monitor_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is none, that is said."""
    monitor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        monkeypatch.setattr(faults, "find_process", {"monitor": monitor.pid}.get)
        loaded("monitor-kill").meet("inside", "step", 0, True)
        assert monitor.wait(timeout=30) == -signal.SIGKILL
        monkeypatch.setattr(faults, "find_process", {}.get)
        loaded("monitor-kill").meet("inside", "step", 0, True)
        assert "finds no monitor" in capsys.readouterr().err
    finally:
        monitor.kill()
        monitor.wait()


def test_who_observes_hears_of_each_step(fresh: Injector) -> None:
    """Also without any fault: only then are its blocks armed."""
    heard: list[int] = []
    faults.load("", 0, 0)
    assert not faults.armed()
    faults.observe(heard.append)
    assert faults.armed()
    for step in (3, 4):
        faults.reached("step", step)
        faults.reached("fwd", step, beat=False)
        faults.left("step", step)
    assert heard == [3, 4]


def test_slow_ends_where_somebody_has_seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step, and in every one that follows."""
    answers = iter((False, False, True))
    monkeypatch.setattr(faults, "_is_told", None)
    faults.slow_until(lambda: next(answers, True))
    injector = loaded("slow:seconds=1000")
    began_s = time.monotonic()
    for step in range(3):
        injector.meet("inside", "step", step, True)
    assert time.monotonic() - began_s < 500


def test_slow_strikes_every_step_from_its_first_and_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A straggler stays one."""
    injector = loaded("slow:step=2,seconds=0")
    for step in range(5):
        injector.meet("inside", "step", step, True)
    assert injector.armed()
    assert capsys.readouterr().err.count("injected fault") == 1
    assert not Plan("slow", seconds=0.0, step=2).due("inside", "step", 1, True)
    assert Plan("slow", seconds=0.0, step=2).due("inside", "step", 3, True)


def test_a_corrected_identity_moves_the_fault() -> None:
    """Ranks that learn their number after the start still strike the right one."""
    injector = loaded(f"{KILL},rank=1", rank=0)
    injector.load(f"{KILL},rank=1", 1, 0)
    assert strikes(injector)


def test_a_plan_made_at_run_time_has_blocks_made_anew(fresh: Injector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is called when arming changes, and not when it does not."""
    calls: list[bool] = []
    monkeypatch.setattr(faults, "on_change", lambda: calls.append(faults.armed()))
    faults.load("", 0, 0)
    assert calls == []
    faults.inject("kill", how="exception", step=3)
    assert calls == [True]
    faults.inject("kill", how="exception", rank=5)
    assert calls == [True]
    with pytest.raises(InjectedError, match="kill:how=exception,step=3"):
        faults.reached("step", 3)


def test_a_plan_made_before_the_start_waits_for_the_identity(fresh: Injector) -> None:
    """`inject` at the top of a script, before anything has started."""
    faults.inject("kill", how="exception", rank=1, attempt="any")
    assert faults.armed()
    faults.reached("step", 0)
    faults.load("", 1, 3)
    with pytest.raises(InjectedError):
        faults.reached("step", 0)


def test_inject_refuses_what_the_text_refuses(fresh: Injector) -> None:
    """One notation, one set of rules."""
    with pytest.raises(ConfigError, match="did you mean 'hang'"):
        faults.inject("hagn")
    with pytest.raises(ConfigError, match="unknown key 'hwo'"):
        faults.inject("hang", hwo="c")


def test_exit_leaves_with_its_code() -> None:
    """As `sys.exit(3)` in user code does."""
    with pytest.raises(SystemExit) as left:
        loaded("kill:how=exit,code=3").meet("inside", "step", 0, True)
    assert left.value.code == 3


_PROGRAM = """
import os, signal, sys, threading, time
from resilience_sdk import faults
signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
beats = open(sys.argv[2], "wb", buffering=0)
def other():
    while True:
        beats.write(b".")
        time.sleep(0.01)
threading.Thread(target=other, daemon=True).start()
faults.load(sys.argv[1], 0, 0)
faults.reached("step", 0)
print("survived")
"""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that is struck; a second thread of it writes a file as long as it can."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, text, str(tmp_path / "beats")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(faults.__file__).parents[1],
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("how", "died_of"),
    [("sigkill", signal.SIGKILL), ("segv", signal.SIGSEGV), ("abort", signal.SIGABRT)],
)
def test_kill_is_a_real_death(
    victim: Callable[[str], subprocess.Popen[str]], how: str, died_of: signal.Signals
) -> None:
    """The parent sees the signal, and the console line came out before it."""
    process = victim(f"kill:how={how}")
    out, err = process.communicate(timeout=30)
    assert process.returncode == -died_of
    assert out == ""
    assert f"injected fault: kill:how={how} strikes rank 0 at step 0" in err


@pytest.mark.parametrize(
    ("how", "others_run", "handles_signals"),
    [("sleep", True, True), ("c", True, False), ("gil", False, False), ("stop", False, False)],
)
def test_hang_is_a_real_hang(
    victim: Callable[[str], subprocess.Popen[str]],
    tmp_path: Path,
    how: str,
    others_run: bool,
    handles_signals: bool,
) -> None:
    """Each way blocks what it says: other threads, Python's signal handlers, or neither."""
    process = victim(f"hang:how={how}")
    assert process.stderr is not None
    assert "injected fault: hang" in process.stderr.readline()
    beats = tmp_path / "beats"
    if others_run:
        seen = beats.stat().st_size
        while beats.stat().st_size < seen + 3:
            assert process.poll() is None
    else:
        assert _stands_still(beats)
    if not handles_signals:
        assert _is_stuck(process.pid)
    process.send_signal(signal.SIGTERM)
    if handles_signals:
        assert process.wait(timeout=10) == 99
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        process.kill()
        assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_pause_ends_by_itself(victim: Callable[[str], subprocess.Popen[str]]) -> None:
    """The rank is stopped, and goes on."""
    process = victim("pause:seconds=0.3")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "survived\n"), err


_SAVES = """
import os, pickle, sys, torch
from resilience_sdk import faults


def training(fault, closures):
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torch.save(weight, "old.pt")
    faults.load(fault, 0, 0)
    faults.reached("step", 0)
    pickle.dumps(weight)  # as all_gather_object does: torch saves the storage into memory, which is no save of ours
    try:
        torch.save(weight, "new.pt")
    except OSError as error:
        print("errno", error.errno, error.filename)
    torch.save(weight, "next.pt")

    def closure():
        optimizer.zero_grad()
        weight.sum().backward()

    closure() if not closures else None
    for _ in range(2):
        optimizer.step(closure if closures else None)
    print("weight", float(weight[0]))


for name in sys.argv[1:]:  # each in a process of its own, and torch is imported once
    os.mkdir(name)
    if not os.fork():
        os.chdir(name)
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 1)
        fault, _, closures = name.partition(" ")
        training(fault, closures)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
_STRUCK = {
    "disk-full": (0, "errno 28", True),
    "corrupt-checkpoint": (-signal.SIGKILL, "", True),
    "kill:where=save": (-signal.SIGKILL, "", True),
    "nan": (0, "weight nan", False),
    "nan closure": (0, "weight nan", False),
    "kill:rank=1": (0, "weight -2.0", False),
}


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """The exit codes of trainings that were struck, and where each ran."""
    folder = tmp_path_factory.mktemp("struck")
    env = os.environ | {"PYTHONPATH": str(Path(faults.__file__).parents[1])}
    command = [sys.executable, "-c", _SAVES, *_STRUCK]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {name: (code, folder / name) for name, code in zip(_STRUCK, map(int, done.stdout.split()), strict=True)}


@pytest.mark.parametrize("fault", _STRUCK)
def test_a_save_or_a_step_is_struck_half_way(struck: dict[str, tuple[int, Path]], fault: str) -> None:
    """Of the save that is struck half is there, the ones before and after it are whole."""
    import torch

    (code, folder), (expected, said, torn) = struck[fault], _STRUCK[fault]
    assert code == expected
    assert said in (folder / "said").read_text()
    whole = (folder / "old.pt").stat().st_size
    assert ((folder / "new.pt").stat().st_size <= whole / 2) is torn
    assert torch.load(folder / "old.pt", weights_only=False).shape == (1000,)
    assert (folder / "next.pt").exists() is (code == 0)


def test_the_newest_checkpoint_of_ours_is_torn(tmp_path: Path) -> None:
    """Not one that was never committed, and not its manifest."""
    for step in ("step-00000010", "step-00000020"):
        place = tmp_path / "checkpoints" / step
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
        (place / "state.pt").write_bytes(b"x" * 1000)
        (place / "values.json").write_text("{}")
    (tmp_path / "checkpoints" / ".tmp-30").mkdir()
    code = "import sys; from pathlib import Path; from resilience_sdk import faults; "
    code += (
        "faults.run_directory = Path(sys.argv[1]); faults.load('corrupt-checkpoint', 0, 0); faults.reached('step', 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(faults.__file__).parents[1], timeout=60)
    assert done.returncode == -signal.SIGKILL
    sizes = {path.parent.name: path.stat().st_size for path in tmp_path.glob("checkpoints/*/state.pt")}
    assert sizes == {"step-00000010": 1000, "step-00000020": 500}
    assert (tmp_path / "checkpoints/step-00000020/manifest.json").read_text() == "{}"


def _stands_still(path: Path) -> bool:
    """Tell whether the file stops growing within a few seconds, for at least 0.2 s."""
    for _ in range(20):
        before = path.stat().st_size
        time.sleep(0.2)
        if path.stat().st_size == before:
            return True
    return False


def _is_stuck(pid: int) -> bool:
    """Tell whether the main thread comes to a halt for good within a few seconds: not on its way there any more."""
    before = None
    for _ in range(200):
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines())
        now = [fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]]
        if fields["State"][0] in "ST" and now == before:
            return True
        before = now
        time.sleep(0.05)
    return False


def test_a_forked_child_is_not_struck(fresh: Injector) -> None:
    """A DataLoader's worker inherits the plan and is no rank."""
    faults.load("kill:how=sigkill", 0, 0)
    child = os.fork()
    if child == 0:
        faults.reached("step", 0)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
