"""The configuration of Accelerate's launcher, as ranks and the launcher see it.

Accelerate turns its configuration into environment variables (mixed precision, FSDP, dynamo, ...), and starts torchrun.
Its own code makes the variables here too, so that they are those of the installed version.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.errors import ConfigError, MissingExtraError

_OPTION = "--accelerate-config"
_ELSEWHERE = {
    "use_deepspeed": "DeepSpeed is started by `accelerate launch`",
    "tpu": "TPUs are started by `accelerate launch`",
    "use_megatron_lm": "Megatron-LM is started by `accelerate launch`",
}


@attrs.frozen
class Launch:
    """What a configuration asks of a launcher."""

    variables: Mapping[str, str]
    """For every rank."""
    nproc_per_node: int
    nnodes: int
    node_rank: int
    endpoint: str | None
    """Where several nodes meet, `host:port`."""


def apply(namespace: argparse.Namespace, defaults: argparse.Namespace, env: MutableMapping[str, str]) -> None:
    """Put a configuration into torchrun's options, where the command line has none, and into the environment.

    Raises:
        ConfigError: The file cannot be used; the message names it and the cure.
        MissingExtraError: Accelerate is not installed.
    """
    launch = read(namespace.accelerate_config)
    options: dict[str, Any] = {"nproc_per_node": str(launch.nproc_per_node)}
    if launch.nnodes > 1:
        options |= {"nnodes": str(launch.nnodes), "node_rank": launch.node_rank}
        options |= {"rdzv_backend": "c10d", "rdzv_endpoint": launch.endpoint} if launch.endpoint else {}
    for name, value in options.items():
        if getattr(namespace, name) == getattr(defaults, name):
            setattr(namespace, name, value)
    for name, text in launch.variables.items():
        env[name] = text


def read(path: str) -> Launch:
    """Read a configuration file of Accelerate; raises as `apply`."""
    if not os.path.isfile(path):
        raise ConfigError(
            f"{_OPTION} {path}: there is no such file; `accelerate config --config_file {path}` makes one"
        )
    try:
        from accelerate.commands import launch as command
        from accelerate.utils.launch import prepare_multi_gpu_env
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise ConfigError(f"{_OPTION}: this version of accelerate cannot be used: {error}") from None
        raise MissingExtraError(f"{_OPTION} needs accelerate: pip install accelerate") from None
    standing = environ.environment()
    with _as_a_launcher():
        try:
            given = command.launch_command_parser().parse_args(["--config_file", path, "script.py"])
            args = command._validate_launch_command(given)[0]
            _refuse(path, args)
            nodes = max(int(args.num_machines or 1), 1)
            if nodes == 1:
                args.main_process_port = 0  # any free one: our launcher finds its own
            made = prepare_multi_gpu_env(args)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever another project's code finds wrong in a file
            raise ConfigError(f"{_OPTION} {path}: accelerate does not take it: {error}") from None
    made["ACCELERATE_USE_CPU"] = str(bool(args.use_cpu)).lower()
    return Launch(
        variables={name: text for name, text in sorted(made.items()) if standing.get(name) != text},
        nproc_per_node=max(int(args.num_processes or 1) // nodes, 1),
        nnodes=nodes,
        node_rank=int(args.machine_rank or 0),
        endpoint=f"{args.main_process_ip}:{args.main_process_port}" if nodes > 1 and args.main_process_ip else None,
    )


def _refuse(path: str, args: argparse.Namespace) -> None:
    for name, why in _ELSEWHERE.items():
        if getattr(args, name, False):
            raise ConfigError(
                f"{_OPTION} {path}: {why}, not by torchrun's options; start it so, and under a foreign "
                "launcher hangs and failures are still reported"
            )


@contextlib.contextmanager
def _as_a_launcher() -> Iterator[None]:
    """Keep what the functions of another launcher print and change away from this one."""
    env = environ.environment()
    before = dict(env)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in set(env) - set(before):
            del env[name]
        env.update(before)
