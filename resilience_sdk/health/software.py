"""The probe of the software: versions, variables, timeouts, signals. Imports nothing of what it looks at.

Reports are written into files that others may read, so values that are secrets are redacted: two tokens count as equal.

deadline of a step or section  <  timeout of the process group  <  what is left of the job
retries of InfiniBand          <  timeout of the process group
collecting evidence + SIGTERM to SIGKILL  <=  what scheduler and elastic give between the two
"""

from __future__ import annotations

import ast
import platform
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from resilience_sdk._version import __version__
from resilience_sdk.core.environ import INTERNAL_JOB
from resilience_sdk.core.redaction import redact
from resilience_sdk.core.settings import Settings, settings_from_json
from resilience_sdk.core.settings.parse import signal_name, signal_number
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import SIGNALS, SOFTWARE, Context
from resilience_sdk.preemption.context import end_time
from resilience_sdk.system import procfs

PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "UCX_", "FI_", "NVTE_")
# Nodes and ranks differ in these by their nature.
OF_ONE_NODE = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"})
_SETTINGS_OF_ONE_NODE = frozenset({"straggler_role"})


def shown_values(effective: Settings) -> dict[str, Any]:
    """Return all settings by name, those that are secrets redacted. A section may be called `forward_pass`."""
    values = effective.to_json()
    return {name: value if isinstance(value, dict) else redact(value, name) for name, value in values.items()}


def shared_settings(effective: Settings) -> Finding:
    """Return the settings that somebody set, and from where."""
    names = sorted(effective.explicit - _SETTINGS_OF_ONE_NODE)
    same = {name: value for name, value in shown_values(effective).items() if name in names}
    told = ", ".join(f"{name} from {effective.sources.get(name, 'code')}" for name in names)
    return _told("settings", told or "all at their defaults", len(names), same)


def variables(env: Mapping[str, str]) -> Finding:
    """Return the variables that change how torch and the communication libraries work."""
    same = redact({name: env[name] for name in sorted(env) if name.startswith(PREFIXES) and name not in OF_ONE_NODE})
    told = ", ".join(f"{name}={value}" for name, value in same.items())
    return _told("environment", told or "none of NCCL, torch or gloo is set", len(same), same)


def _told(check: str, evidence: str, value: int | str, same: Mapping[str, Any]) -> Finding:
    """Return what is in order, and to be the same on all nodes."""
    return SOFTWARE.found(check, Status.OK, evidence, value, data={"same": same})


# Whose these are in practice: a second user makes the first one deaf.
TAKEN = {
    "SIGUSR1": "NCCL and Lightning's requeue under Slurm",
    "SIGUSR2": "submitit's requeue and many programs' own dumps",
}


BLOCKED, IGNORED, NOT_PYTHONS = "blocked", "ignored", ""
"""What may stand for the handler of a signal: it does not arrive, it is not heard, a library outside Python has it."""


def dispositions(root: str = "/") -> dict[str, str]:
    """Return what this process does with signals that are not free, by name: who handles it; in any thread."""
    status = procfs.fields(procfs.below(root, "/proc/self/status"), ":")
    found = {}
    for number in signal.valid_signals():
        handler, name = signal.getsignal(number), _name_of(number)
        if callable(handler) and handler is not signal.default_int_handler:
            found[name] = _who(handler)
        elif handler is None:
            found[name] = NOT_PYTHONS
        for mask, word in (("SigIgn", IGNORED), ("SigBlk", BLOCKED)):
            if procfs.has_signal(status.get(mask), number):
                found[name] = word
    return found


def signals(settings: Settings, found: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each signal that will not do what it is for, or one that all will. Pure."""
    uses = {name: "preempt_signals" for name in settings.preempt_signals}
    if settings.dump_signal:
        uses[signal_name(settings.dump_signal)] = "dump_signal"
    bad = [
        SIGNALS.found("signal", Status.DEGRADED, problem[0], setting, subject=name, cure=problem[1])
        for name, setting in uses.items()
        if (problem := _problem(name, setting, found.get(name))) is not None
    ]
    return bad or [SIGNALS.found("signal", Status.OK, f"{', '.join(uses)} are free to be handled")]


def _problem(name: str, setting: str, handler: str | None) -> tuple[str, str] | None:
    """Return what is wrong with a signal, and the cure; None where nothing is."""
    another = f"choose another with --{setting.replace('_', '-')}"
    if handler == BLOCKED:
        return (
            "it is blocked in this process and in all that it starts: it never arrives",
            "find who blocks it before the job (`grep SigBlk /proc/PID/status` up the process tree)",
        )
    if handler == IGNORED:
        return (
            "whoever started this has it ignored (`nohup`, `trap '' ...`): programs that do not install a handler of "
            "their own are deaf to it",
            f"start without that, or {another}",
        )
    if handler == NOT_PYTHONS:
        return "a library outside Python handles it, which cannot be chained: whoever installs last wins", another
    if setting == "dump_signal" and handler is not None and not handler.startswith("resilience_sdk"):
        return f"{handler} handles it already", f"{another}, such as SIGRTMAX-3"
    if setting == "dump_signal" and name in TAKEN:
        return f"{TAKEN[name]} use it too", f"{another}, such as SIGRTMAX-3 (the default)"
    return None


def _name_of(number: int) -> str:
    """Return the name of any signal, of those that cannot be handled too."""
    try:
        return signal_name(signal_number(number))
    except ValueError:
        return f"signal {int(number)}"


def _who(handler: object) -> str:
    module = getattr(handler, "__module__", None) or type(handler).__module__
    return f"{module}.{getattr(handler, '__qualname__', type(handler).__qualname__)}"


# Defaults of torch.distributed for `init_process_group(timeout=None)`.
NCCL_TIMEOUT_S, OTHER_TIMEOUT_S = 600.0, 1800.0
KILL_WAIT_S = 30.0  # default of Slurm's KillWait, and of elastic's shutdown_timeout
# InfiniBand: 4.096 us * 2^timeout for each of the tries. NCCL's own defaults.
_IB_UNIT_S, _IB_TIMEOUT, _IB_RETRIES = 4.096e-6, 20, 7
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def order(settings: Settings, env: Mapping[str, str], *, has_gpus: bool, now_unix: float) -> list[Finding]:
    """Return a finding for each pair that is in the wrong order, or one that all are right.

    Only deadlines that somebody set are compared: learned ones keep below the process group's by themselves.
    """
    found = [
        *_before_the_group(settings, env, has_gpus),
        *_before_the_end(settings, env, now_unix),
        *_before_the_kill(settings, env),
    ]
    return found or [SOFTWARE.found("timeouts", Status.OK, "they go off in the right order")]


def _disorder(subject: str, value_s: float, limit_s: float, evidence: str, cure: str) -> Finding:
    """Return what is said of one pair of timeouts that go off in the wrong order."""
    return SOFTWARE.found("timeouts", Status.DEGRADED, evidence, value_s, subject=subject, limit=limit_s, cure=cure)


def _before_the_group(settings: Settings, env: Mapping[str, str], has_gpus: bool) -> Iterator[Finding]:
    group_s, group = (NCCL_TIMEOUT_S, "NCCL") if has_gpus else (OTHER_TIMEOUT_S, "gloo")
    for name, deadline_s in _deadlines(settings).items():
        if deadline_s >= group_s:
            evidence = (
                f"{deadline_s:g} s, and torch ends the ranks {group_s:g} s into a collective ({group}'s default): then "
                "a hang is seen as their death"
            )
            cure = f"set it below {group_s:g}, or pass a longer timeout= to init_process_group"
            yield _disorder(name, deadline_s, group_s, evidence, cure)
    heartbeat_s = _number(env.get(_HEARTBEAT))
    longest = max(_deadlines(settings).values(), default=0.0)
    if heartbeat_s is not None and env.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0" and longest >= heartbeat_s:
        evidence = f"{heartbeat_s:g} s: NCCL's watchdog may abort a stuck rank before our deadline of {longest:g} s"
        yield _disorder(_HEARTBEAT, heartbeat_s, longest, evidence, f"raise {_HEARTBEAT} above {longest:g}")
    exponent, tries = _number(env.get("NCCL_IB_TIMEOUT")), _number(env.get("NCCL_IB_RETRY_CNT"))
    used, count = _IB_TIMEOUT if exponent is None else exponent, _IB_RETRIES if tries is None else tries
    retries_s = _IB_UNIT_S * 2.0 ** min(used, 31.0) * count
    if retries_s >= NCCL_TIMEOUT_S:
        evidence = (
            f"InfiniBand tries for {retries_s:.0f} s before it tells of a broken path; by then NCCL's watchdog has "
            f"ended the ranks ({NCCL_TIMEOUT_S:g} s), and nobody says which path"
        )
        cure = f"lower NCCL_IB_TIMEOUT to {_IB_TIMEOUT} (and NCCL_IB_RETRY_CNT to {_IB_RETRIES})"
        yield _disorder("NCCL_IB_TIMEOUT", retries_s, NCCL_TIMEOUT_S, evidence, cure)


def _before_the_end(settings: Settings, env: Mapping[str, str], now_unix: float) -> Iterator[Finding]:
    end = end_time(env, now_unix)
    if end is None:
        return
    left_s = end - now_unix
    for name, deadline_s in {**_deadlines(settings), "preempt_time": settings.preempt_time}.items():
        if deadline_s >= left_s:
            evidence = f"{deadline_s:g} s, and the scheduler ends the job in {left_s:.0f} s"
            cure = "ask the scheduler for more time (`--time`), or set it lower"
            yield _disorder(name, deadline_s, round(left_s), evidence, cure)


def _before_the_kill(settings: Settings, env: Mapping[str, str]) -> Iterator[Finding]:
    ours_s, asked_s = settings.dump_grace + settings.term_grace, settings.preempt_time
    if ours_s > KILL_WAIT_S and "SLURM_JOB_ID" in env:
        evidence = f"evidence and SIGTERM take {ours_s:g} s, and Slurm kills {KILL_WAIT_S:g} s after its own (KillWait)"
        cure = f"set term_grace to {max(0.0, KILL_WAIT_S - settings.dump_grace):g} or less"
        yield _disorder("term_grace", ours_s, KILL_WAIT_S, evidence, cure)
    is_torchruns = "TORCHELASTIC_RUN_ID" in env and INTERNAL_JOB not in env
    # Where nobody set it, what torchrun gives is known without.
    if is_torchruns and asked_s > KILL_WAIT_S and "preempt_time" in settings.explicit:
        evidence = f"{asked_s:g} s, and torchrun kills the ranks {KILL_WAIT_S:g} s after it passed SIGTERM on"
        cure = f"set preempt_time to {KILL_WAIT_S:g} or less, or start with `resilience run`"
        yield _disorder("preempt_time", asked_s, KILL_WAIT_S, evidence, cure)


def _deadlines(settings: Settings) -> dict[str, float]:
    """Return the deadlines that somebody set, by what they are called."""
    named = {
        "heartbeat_timeout": settings.heartbeat_timeout,
        "initial_heartbeat_timeout": settings.initial_heartbeat_timeout,
        "out_of_section_timeout": settings.out_of_section_timeout,
        **{f"section_timeouts {name}": value for name, value in settings.section_timeouts.items()},
    }
    return {name: value for name, value in named.items() if value is not None}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


MIN_TORCH = (2, 7)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
# Frameworks whose collectives or checkpoints change between versions, where they are installed.
_FRAMEWORKS = ("lightning", "pytorch-lightning", "accelerate", "transformers", "deepspeed", "megatron-core", "numpy")


def python() -> Finding:
    """Return the interpreter."""
    version = platform.python_version()
    evidence = f"{platform.python_implementation()} {version}, {sys.executable}"
    return _told("python", evidence, version, {"python": version})


def torch_finding(built: Mapping[str, Any] | None) -> Finding:
    """Return what is said of an installed torch, given the names in its `version.py`; None: there is none. Pure."""
    least = ".".join(map(str, MIN_TORCH))
    if built is None:
        cure = f"`{sys.executable} -m pip install torch`, or activate the environment that has it"
        return SOFTWARE.found("torch", Status.FAILED, "not installed for this interpreter", cure=cure, limit=least)
    version = str(built.get("__version__", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    cuda = built.get("cuda") or built.get("hip")
    device = f"for {'CUDA' if built.get('cuda') else 'ROCm'} {cuda}" if cuda else "for CPU"
    return SOFTWARE.found(
        "torch",
        Status.OK if numbers >= MIN_TORCH else Status.FAILED,
        f"{version}, built {device}",
        version,
        limit=least,
        cure=f"`pip install 'torch>={least}'`",
        data={"same": {"torch": version, "cuda": cuda}},
    )


def installed_torch() -> dict[str, Any] | None:
    """Return what torch's `version.py` says, None where there is no torch. Reads files, imports nothing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return assigned_constants(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {"__version__": version_of("torch") or ""}


def assigned_constants(source: str) -> dict[str, Any]:
    """Return the constants that a module assigns at its top level, by name, without running it."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: node.value.value for target in targets if isinstance(target, ast.Name)})
    return found


def nccl(has_gpus: bool) -> Iterator[Finding]:
    """Yield the NCCL that torch brought along; nothing where there is neither a GPU nor NCCL."""
    version = next((found for name in _NCCL_PACKAGES if (found := version_of(name))), None)
    if version is not None:
        yield _told("nccl", version, version, {"nccl": version})
    elif has_gpus:
        evidence = "no package of its own: torch holds one, whose version torch.cuda.nccl.version() tells"
        yield SOFTWARE.found("nccl", Status.UNAVAILABLE, evidence)


def packages() -> Finding:
    """Return the SDK and the frameworks."""
    versions = {"resilience-sdk": __version__}
    versions.update({name: version for name in _FRAMEWORKS if (version := version_of(name))})
    evidence = ", ".join(f"{name} {version}" for name, version in versions.items())
    return _told("packages", evidence, __version__, versions)


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def probe(context: Context) -> Iterator[Finding]:
    """Yield settings, variables and the order of timeouts, then the versions, which read many files."""
    settings = settings_from_json(context.settings)
    has_gpus = procfs.below(context.root, "/proc/driver/nvidia").exists()
    yield shared_settings(settings)
    yield variables(context.environment)
    yield from order(settings, context.environment, has_gpus=has_gpus, now_unix=time.time())
    yield python()
    yield torch_finding(installed_torch())
    yield from nccl(has_gpus)
    yield packages()
