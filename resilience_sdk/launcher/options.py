"""The command line of `resilience run`: torchrun's own options, Accelerate's configuration, ours, and one per setting.

torchrun's parser is used as it is, so every option and `PET_` variable that the installed torch knows works.
What differs: three restarts instead of none, workers forked from a preloaded server, and on one node without
a rendezvous a free port is taken, so that two runs on one machine do not meet.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import os
import uuid
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import attrs

from resilience_sdk import faults
from resilience_sdk.core import environ
from resilience_sdk.core.console import say
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.settings import Settings, load_settings, nvrx
from resilience_sdk.core.settings import options as setting_options
from resilience_sdk.core.settings.load import read_file
from resilience_sdk.core.settings.options import MORE_OF_SETTINGS, add_short_help
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher import accelerate_config
from resilience_sdk.launcher.bounds import (
    LAST_PORT,
    MASTER_PORT,
    check_endpoint,
    check_master_address,
    check_room,
    room_for_ranks,
)
from resilience_sdk.launcher.forkserver_wire import Script

StartMethod = Literal["forkserver", "exec"]

_WITH_HOST_AND_PORT = ("static", "c10d", "etcd", "etcd-v2")
_RENDEZVOUS_TIMES = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
)
# Settings that torchrun has an option for too: its variable counts where the option is not given.
_SHARED_WITH_TORCHRUN = ("max_restarts", "monitor_interval")
# What `--help` shows, by title. The rest is for people who look for it: `--help-all`.
_USUAL: Mapping[str, Sequence[str]] = {
    "ranks and nodes": (
        *("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id"),
        *("--master-addr", "--master-port", "--module"),
    ),
    "the run": ("--run-dir", "--fresh", "--config", "--preflight", "--log-dir", "--tee"),
    "faults": ("--max-restarts", "--on-hang", "--stuck-after", "--heartbeat-timeout", "--section-timeouts"),
    "checkpoints and preemption": (
        *("--checkpoint-every", "--checkpoint-async", "--preempt-signals", "--preempt-time"),
    ),
    "stragglers": ("--report-interval", "--stop-if-detected"),
    "telemetry": ("--prometheus-address", "--otlp-endpoint", "--webhook-url"),
    "help": ("--help", "--help-all"),
}
_DESCRIPTION = (
    "Runs a PyTorch script on the ranks of this node, as torchrun does, and restarts it when a rank dies or "
    "hangs. Takes every option of torchrun."
)


@attrs.frozen
class Options:
    """A checked command line. `elastic` holds torchrun's options, as `torch.distributed.run` reads them."""

    elastic: argparse.Namespace
    settings: Settings
    script: Script
    fresh: bool
    preflight: bool
    start_method: StartMethod
    local: bool  # one node and no rendezvous given
    argv: tuple[str, ...]
    nvrx_section: Mapping[str, Any] | None = None
    """What the ranks find in place of NVIDIA's extension is told: its configuration; None: nothing is provided."""

    @property
    def elastic_signals(self) -> str:
        """Names of the signals that torchrun handles, separated by commas."""
        return str(getattr(self.elastic, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"))

    @property
    def one_node(self) -> bool:
        """Whether this node is the only one, now and later."""
        return self.local or most_nodes(self.elastic) == 1

    @property
    def rendezvous_id(self) -> str | None:
        """The id of a rendezvous that other nodes may share, or None."""
        given = str(self.elastic.rdzv_id)
        if self.local:
            return None
        # Without an id, nodes are of one job if they meet at one place; on one node a place proves nothing.
        return given if given not in ("", "none") or str(self.elastic.nnodes) not in ("1", "1:1") else None

    @property
    def meeting_point(self) -> str:
        """Where the nodes meet: the endpoint of the rendezvous, else the master's address."""
        elastic = self.elastic
        return str(elastic.rdzv_endpoint or f"{elastic.master_addr}:{elastic.master_port}")


def parse_options(argv: Sequence[str], env: MutableMapping[str, str] | None = None) -> Options:
    """Read the command line and everything else that the run depends on, before any rank exists.

    Raises:
        ConfigError: An option is unknown or bad, the script does not exist, or a setting is wrong.
        SystemExit: `--help` was asked and answered.
    """
    env = environ.environment() if env is None else env
    parser = _parser()
    has_value = _has_value(parser)
    argv = _spelt_out(argv, has_value)
    words = setting_options.plain_switches(argv, lambda name: has_value.get(name, False))
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(unknown[0], parser)
    if namespace.accelerate_config is not None:
        accelerate_config.apply(namespace, parser.parse_args(["script.py"]), env)
    script = Script.parse(
        namespace.training_script,
        namespace.training_script_args,
        module=bool(namespace.module),
        no_python=bool(namespace.no_python),
    )
    script.check()
    _settle_nvrx(namespace, parser)
    settings = _settings(namespace, env)
    faults.parse(env.get(environ.FAULT, ""))  # a fault that is misspelt must not look like a promise that held
    start_method = _start_method(namespace.start_method)
    local = _settle_rendezvous(namespace)
    _settle_for_elastic(namespace, settings)
    options = Options(
        namespace,
        settings,
        script,
        bool(namespace.fresh),
        bool(namespace.preflight),
        start_method,
        local,
        tuple(argv),
        _nvrx_section(namespace, env) if namespace.provide_nvrx else None,
    )
    _check_counts(namespace)
    _settle_threads(options, env)
    launch_config(options, os.devnull)  # finds what torchrun would refuse
    return options


def launch_config(options: Options, log_dir: str) -> Any:
    """Return torch's `LaunchConfig` for these options, with per-rank logs under `log_dir`.

    Raises ConfigError for values that torchrun refuses.
    """
    from torch.distributed.run import config_from_args

    args = argparse.Namespace(**vars(options.elastic))
    args.log_dir = os.devnull if log_dir == os.devnull else args.log_dir or log_dir
    try:
        config, _, _ = config_from_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{error}") from None
    return config


def resume_command(options: Options, run_dir: str) -> str:
    """Return the command line that resumes this run, for people to copy: without `--fresh` and without secrets.

    The run directory is named in full, however it was: people copy it elsewhere.
    """
    import shlex

    # From the script on, the words are the script's own.
    ours = max(0, len(options.argv) - len(options.elastic.training_script_args) - 1)
    words = _without_run_dir(word for word in options.argv[:ours] if word != "--fresh")
    words = ["--run-dir", run_dir, *words, *options.argv[ours:]]
    return shlex.join(["resilience", "run", *redact_argv(words)])


def _without_run_dir(words: Iterable[str]) -> list[str]:
    kept: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if not is_value and name != "--run-dir":
            kept.append(word)
        is_value = not is_value and name == "--run-dir" and not equals
    return kept


def most_nodes(args: argparse.Namespace) -> int:
    """Return how many nodes there may be at most; raises ConfigError for a bad `--nnodes`."""
    return _nodes(args)[1]


def least_nodes(args: argparse.Namespace) -> int:
    """Return how many nodes there must be at least; raises ConfigError for a bad `--nnodes`."""
    return _nodes(args)[0]


def _nodes(args: argparse.Namespace) -> tuple[int, int]:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        least, most = parse_min_max_nnodes(args.nnodes)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {args.nnodes!r} is neither N nor MIN:MAX") from None
    if not 1 <= int(least) <= int(most):
        raise ConfigError(
            f"--nnodes {args.nnodes}: expected N or MIN:MAX, with MIN of 1 or more and MAX no less than MIN"
        )
    return int(least), int(most)


def known_options() -> dict[str, bool]:
    """Return every spelling of every option of `resilience run`, and whether a value follows it."""
    return _has_value(_parser())


def _has_value(parser: argparse.ArgumentParser) -> dict[str, bool]:
    return {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}


def _spelt_out(words: Sequence[str], has_value: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the words with torchrun's options in full where torchrun takes them in short (`--max_restart 2`).

    Up to the script, whose own options follow.
    """
    from torch.distributed.run import get_args_parser

    elastic = {name: action.dest for action in get_args_parser()._actions for name in action.option_strings}
    full: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if word == "--" or not word.startswith("-"):
            full.append(word)
            break
        if name.startswith("--") and name not in has_value:
            meant = [one for one in elastic if one.startswith(name)]
            if len({elastic[one] for one in meant}) == 1:
                name = meant[0]
        full.append(name + equals + value)
        if not equals and has_value.get(name, False):
            full.extend(itertools.islice(left, 1))
    return (*full, *left)


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "resilience run"
    # Abbreviations reach behind the script: its own `--out` would be "ambiguous" with two of our options.
    parser.allow_abbrev = False
    parser.description = _DESCRIPTION
    for action in parser._actions:
        if action.dest == "start_method":
            # torchrun's own values mean nothing for scripts; accept them so that its command lines work.
            action.choices = ["forkserver", "exec", "spawn", "fork"]
            action.default = action.default if action.default != "spawn" else "forkserver"
            action.help = (
                "forkserver: ranks are forked from a server with torch loaded, so restarts take a fraction of a "
                "second; exec: each rank is a fresh interpreter."
            )
        elif action.dest == "master_port" and action.default == MASTER_PORT:
            # So before torch 2.13, where nobody could tell a port that was asked for from one that was not: two jobs of
            # one machine would want the same.
            action.default = None
    group = parser.add_argument_group("run")
    group.add_argument(
        "--fresh",
        action="store_true",
        help="start over: what is in the run directory is moved aside, nothing is deleted",
    )
    group.add_argument(
        "--preflight",
        action="store_true",
        help="look at this node first, as `resilience doctor --compute` does, and leave where a job cannot start; "
        "several nodes then try one another in pairs",
    )
    group.add_argument(
        "--accelerate-config",
        metavar="FILE",
        help="what `accelerate launch --config_file FILE` tells its ranks (precision, FSDP, ...) and their number; "
        "an option given here counts before it",
    )
    group.add_argument(
        "--provide-nvrx",
        action="store_true",
        help="the ranks find the SDK under the names of NVIDIA's resiliency extension, so that its users' scripts run "
        "unchanged; see docs/nvrx.md",
    )
    setting_options.add_setting_options(parser)
    add_short_help(parser, _USUAL, usage="[options] script.py [arguments]", more=MORE_OF_SETTINGS)
    parser.error = _usage_error  # type: ignore[method-assign]
    return parser


def _usage_error(message: str) -> NoReturn:
    if "training_script" in message:
        message = "no script given; usage: resilience run [options] script.py [arguments]"
    raise ConfigError(message)


def _refuse_unknown(word: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = word.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; see `resilience run --help-all`"
    if not close and name.startswith(("--ft-", "--ft_")):
        hint = ": of NVIDIA's launcher those of docs/nvrx.md are known; leave it out"
    raise ConfigError(f"unknown option {name}{hint} (options of the script go after the script)")


def _settings(namespace: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    arguments = setting_options.settings_arguments(namespace)

    def load(given: Mapping[str, Any]) -> Settings:
        return load_settings(
            arguments=given,
            config_file=setting_options.config_option(namespace),
            nvrx_file=setting_options.nvrx_file(namespace),
            env=env,
            strict_env=True,
        )

    settings = load(arguments)
    # torchrun's variables are its defaults: they count where nobody told us anything.
    unset = [name for name in _SHARED_WITH_TORCHRUN if name not in settings.sources]
    if torchruns := {name: value for name in unset if (value := env.get(f"PET_{name.upper()}"))}:
        settings = load({**torchruns, **arguments})
    return attrs.evolve(settings, on_hang="restart") if settings.on_hang is None else settings


def _settle_nvrx(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Do what options of NVIDIA's launcher ask for that become options of torchrun, where those are not given.

    There nodes meet by c10d unless something else is asked for, and one node alone meets nobody. Raises ConfigError
    for a policy that is not there.
    """
    if args.provide_nvrx and args.rdzv_backend in ("static", "c10d"):
        if not args.rdzv_endpoint and most_nodes(args) > 1:
            args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or MASTER_PORT}"
        args.rdzv_backend = "c10d" if args.rdzv_endpoint else "static"
    if args.provide_nvrx and least_nodes(args) < most_nodes(args):
        say(
            f"--nnodes {args.nnodes}: all nodes that come take part, none is a spare that waits as with newer versions "
            f"of NVIDIA's launcher; for a world of one size give --nnodes {least_nodes(args)}"
        )
    given = setting_options.nvrx_options(args)
    policy = given.get(nvrx.RESTART_POLICY, "any-failed")
    if policy != "any-failed":
        raise ConfigError(
            f"{nvrx.spellings(nvrx.RESTART_POLICY)[0]} {policy}: only any-failed is known here, the ranks of all nodes "
            "start again together; leave it out, and with --nnodes MIN:MAX the job goes on without a node that is lost"
        )
    prefix = given.get(nvrx.PER_CYCLE_LOGS)
    if prefix is not None:
        directory = os.path.dirname(os.path.abspath(prefix))
        if args.log_dir is None:
            args.log_dir = directory
        if args.tee == parser.get_default("tee"):
            args.tee = "3"
        option = nvrx.spellings(nvrx.PER_CYCLE_LOGS)[0]
        say(f"{option}: each rank has a file of its own for each attempt, below {args.log_dir}")


def _nvrx_section(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, Any]:
    """Return what a client of NVIDIA's extension is configured with: by the files, with options over them.

    Of values that were checked before, as settings.
    """
    own_file = setting_options.config_option(args) or env.get(environ.CONFIG)
    given: dict[str, Any] = {}
    for file in (setting_options.nvrx_file(args), own_file):
        given |= (nvrx.find_section(read_file(Path(file)), file) if file else None) or {}
    given |= setting_options.nvrx_options(args)
    return {name: given[name] for name in nvrx.OF_CLIENT if name in given}


def _start_method(name: str) -> StartMethod:
    if name == "forkserver":
        return "forkserver"
    if name != "exec":
        say(f"--start-method {name} is for functions, not scripts: ranks are fresh interpreters (exec)")
    return "exec"


def _settle_rendezvous(args: argparse.Namespace) -> bool:
    """Complete torchrun's options; tell whether there is one node and no rendezvous was given."""
    most = most_nodes(args)
    open_ = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    local = bool(args.standalone) or (open_ and most == 1)
    if local:
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = uuid.uuid4().hex[:8]
        # The host's own name may not resolve (laptops, containers); with one node nobody needs it. The ranks find
        # the address that torchrun would give them, with --standalone and without.
        args.local_addr = args.local_addr or ("localhost" if args.standalone else "127.0.0.1")
    else:
        _check_backend(str(args.rdzv_backend))
        if args.rdzv_backend in _WITH_HOST_AND_PORT:
            check_endpoint(str(args.rdzv_endpoint or ""), several=most > 1)
    if args.master_port is None:
        args.master_port = MASTER_PORT
    return local


def _check_backend(name: str) -> None:
    from torch.distributed.elastic.rendezvous import registry as _backends  # noqa: F401 - fills it
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

    known = sorted(getattr(registry, "_registry", {}))
    if known and name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"--rdzv-backend {name!r} is unknown; {hint}")


def _check_counts(args: argparse.Namespace) -> None:
    """Refuse numbers of ranks, nodes and seconds with which no job can run; torch would raise, or wait, later on."""
    most = most_nodes(args)
    if args.rdzv_backend == "static" and not 0 <= int(args.node_rank) < most:
        raise ConfigError(f"--node-rank {args.node_rank}: with --nnodes {args.nnodes} it is one of 0 to {most - 1}")
    check_master_address(str(args.master_addr or ""))
    if not 0 <= int(args.master_port) <= LAST_PORT:
        raise ConfigError(f"--master-port {args.master_port}: expected a port, 0 to {LAST_PORT}")
    for name, value in _rendezvous_times(str(args.rdzv_conf)):
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"--rdzv-conf {name}={value}: expected a whole number above 0 (times are in seconds)")


def _rendezvous_times(text: str) -> list[tuple[str, str]]:
    """Return what `--rdzv-conf` (`name=value,...`) says of times; torch itself refuses what has another form."""
    pairs = (item.partition("=") for item in text.split(","))
    return [(name.strip(), value.strip()) for name, _, value in pairs if name.strip() in _RENDEZVOUS_TIMES]


def _settle_threads(options: Options, env: MutableMapping[str, str]) -> None:
    """Give each of several ranks one thread, as torchrun does, in one line instead of its banner."""
    from torch.distributed.run import determine_local_world_size

    given = options.elastic.nproc_per_node
    try:
        ranks = determine_local_world_size(given)
    except ValueError as error:
        raise ConfigError(f"--nproc-per-node {given}: {error}") from None
    if ranks < 1:
        raise ConfigError(
            f"--nproc-per-node {given}: a node has 1 rank or more; give their number, or auto, cpu or gpu"
        )
    check_room(given, ranks, room_for_ranks())
    if ranks > 1 and "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = "1"
        say("OMP_NUM_THREADS=1 for each rank, as torchrun sets it; set it yourself to choose another")


def _settle_for_elastic(args: argparse.Namespace, settings: Settings) -> None:
    """Give torchrun's options that we decide ourselves the values that its code expects."""
    args.max_restarts = settings.max_restarts
    args.monitor_interval = settings.monitor_interval
    args.start_method = "spawn"
    args.run_path = False
    for name, value in (("virtual_local_rank", False), ("shutdown_timeout", None)):
        with contextlib.suppress(AttributeError):
            if getattr(args, name) is None:
                setattr(args, name, value)
