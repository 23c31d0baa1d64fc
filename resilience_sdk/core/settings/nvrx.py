"""The configuration of NVIDIA's resiliency extension (NVRx), as ours.

Its `fault_tolerance:` section may sit at any depth of a YAML file, and its launcher takes the same names as
`--ft-<name>` or `--ft-param-<name>` (older versions), and options of its own. Every name is translated, or told with
the reason why it has no counterpart. A bad value or an unknown name is an error: a typo must not disable a protection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.console import say_once
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.core.settings import parse
from resilience_sdk.core.settings.fields import nearest, read_value
from resilience_sdk.core.settings.parse import shown
from resilience_sdk.errors import ConfigError

PACKAGE = "nvidia_resiliency_ext"
SECTION = "fault_tolerance"
FILE_OPTIONS = ("--fault-tol-cfg-path", "--ft-cfg-path", "--ft-cfg_path", "--ft_cfg_path")

_FABRIC = "the watch beside the job looks at the links of the fabric, see health_interval"
_STORAGE = "`--preflight` looks at the storage of the run directory"
_MEMORY = "GPU memory is freed with the process"
_PROGRESS = "attempts that end before their first completed step stop the job after three"
_ATTRIBUTION = "causes are attributed locally, without a service"
_LOGS = "each node writes the output of its own ranks, see --log-dir"

TRANSLATED: Mapping[str, str] = {
    "initial_rank_heartbeat_timeout": "initial_heartbeat_timeout",
    "rank_heartbeat_timeout": "heartbeat_timeout",
    "rank_section_timeouts": "section_timeouts",
    "rank_out_of_section_timeout": "out_of_section_timeout",
    "safety_factor": "safety_factor",
    "node_health_check_interval": "health_interval",
}
"""Key of the section -> our setting."""
WITHOUT_COUNTERPART: Mapping[str, str] = {
    "workload_check_interval": "the monitor looks when a deadline is due; no calculated timeout is below it",
    "rank_termination_signal": "a stuck rank gets SIGTERM and, after term_grace, SIGKILL",
    "log_level": "what a person must know is always one line on standard error",
    "restart_check_interval": "it had no effect there either",
    "enable_nic_monitor": _FABRIC,
    "enable_nic_healthcheck": _FABRIC,
    "pci_topo_file": _FABRIC,
    "link_down_path_template": _FABRIC,
    "link_state_path_template": _FABRIC,
    "enable_dist_storage_healthcheck": _STORAGE,
    "storage_healthcheck_path": f"{_STORAGE}; `resilience doctor --data PATH` looks at others",
    "skip_section_response": "a section never waits for an answer",
    "segment": "ranks are placed by the launcher and the scheduler",
    "segment_health_check_dir": "ranks are placed by the launcher and the scheduler",
    "numa_bind_strict": "NUMA binding is an option of the launcher",
    "gpu_memory_reclaim_timeout": _MEMORY,
    "gpu_memory_tolerance_mb": _MEMORY,
    "gpu_memory_poll_interval": _MEMORY,
    "check_remaining_processes": "ranks are always ended with their whole session",
    "max_no_progress_cycles": _PROGRESS,
    "min_progress_iterations": _PROGRESS,
    "checkpoint_iteration_file": "steps are read from the ranks themselves",
    "install_exception_hook": "an uncaught exception is always recorded",
    "num_warmup_iterations": "first occurrences have deadlines of their own",
    "attribution_endpoint": _ATTRIBUTION,
    "attribution_stop_action": _ATTRIBUTION,
    "attribution_decision_timeout": _ATTRIBUTION,
    "attribution_export_url": f"{_ATTRIBUTION}; webhook_url has every incident posted",
    "cycle_info_dir": "the journal in the run directory tells of every attempt",
    "fact_url": "`resilience why` reads the kernel's log of the node by itself",
    "health_logging": "what the watch of the node finds stands in the journal",
}
"""Key of the section -> the reason why there is none of ours."""
KEYS = (*TRANSLATED, *WITHOUT_COUNTERPART)
OF_FRAMEWORKS: Mapping[str, str] = {
    "restart_policy": "any-failed is what is done anyway",
    "calculate_timeouts": "it is the callback's: timeouts are learned unless it is False there, or a client sets them",
    "max_rank_restarts": "restarts are the option --max-restarts of the launcher",
    "max_subsequent_job_failures": "`resilience supervise --max-job-retries` starts a job again",
    "additional_ft_launcher_args": "options of the launcher are read from its command line",
    "simulated_fault": "a fault is rehearsed by RESILIENCE_FAULT, or by SimulatedFaultParams of a callback",
}
"""Key that NeMo and NeMo RL have in the same section, for themselves -> the reason why nothing is done with it."""
OF_CLIENT = (*TRANSLATED, "workload_check_interval", "rank_termination_signal", "log_level")
"""Keys that a rank's client is told; others may hold addresses with passwords."""

OPTIONS_TRANSLATED: Mapping[str, str] = {
    "term_timeout": "preempt_time",
    "workers_stop_timeout": "term_grace",
}
"""Option of the launcher that is no key of the section -> our setting."""
PER_CYCLE_LOGS = "ft_per_cycle_applog_prefix"
RESTART_POLICY = "ft_restart_policy"
OPTIONS_TAKEN: Mapping[str, str] = {
    PER_CYCLE_LOGS: "`--log-dir` with its directory and `--tee 3`: a file for each rank and attempt",
    RESTART_POLICY: "`any-failed` is what is done anyway; `min-healthy` is refused: with --nnodes MIN:MAX the job goes "
    "on without a node that is lost",
    **dict.fromkeys(
        ("ft_ignore_missing_cfg", "ignore_missing_fault_tol_cfg"),
        "a file without a `fault_tolerance:` section is passed over, else that is an error; no file is needed",
    ),
}
"""Option of the launcher -> what is done with it there, since no setting has a counterpart."""
OPTIONS_WITHOUT_COUNTERPART: Mapping[str, str] = {
    "ft_rdzv_impl": "nodes meet as torch.distributed.elastic has it, see --rdzv-backend",
    "ft_nvrx_logfile": "what the launcher says is on standard error, what it does is in the journal",
    "ft_enable_log_server": _LOGS,
    "ft_log_server_port": _LOGS,
    "ft_log_aggregator_count": _LOGS,
    "ft_log_leaf_max_queue_chunks": _LOGS,
    "ft_log_server_log_prefix": _LOGS,
    "ft_log_server_graceful_shutdown_timeout": _LOGS,
    "ft_attribution_startup_timeout": _ATTRIBUTION,
    "ft_attribution_llm_api_key_file": _ATTRIBUTION,
    "ft_attribution_llm_base_url": _ATTRIBUTION,
    "ft_attribution_llm_model": _ATTRIBUTION,
    "ft_attribution_analysis_backend": _ATTRIBUTION,
    "ft_attribution_compute_timeout": _ATTRIBUTION,
    "ft_attribution_log_level": _ATTRIBUTION,
    "ft_node_health_check_endpoint": "no service is asked; `--preflight` looks at the node before the first attempt",
    "ft_cycle_info_job_id": "the journal in the run directory tells of every attempt",
    "ft_health_log_prefix": "what the watch of the node finds stands in the journal",
    "ft_enable_health_log_dmesg": "`resilience why` reads the kernel's log of the node by itself",
    "ft_enable_fact_result_artifact": "`resilience why` reads the kernel's log of the node by itself",
}
"""Option of the launcher that is no key of the section -> the reason why there is none of ours."""
OPTIONS = (*OPTIONS_TRANSLATED, *OPTIONS_TAKEN, *OPTIONS_WITHOUT_COUNTERPART)
SWITCHES = ("ft_ignore_missing_cfg", "ignore_missing_fault_tol_cfg")
"""Options that no value follows."""


def spellings(name: str) -> tuple[str, ...]:
    """Return how versions 0.2 to 0.6 spell an option on the command line, the newest first."""
    dashed = name.replace("_", "-")
    if name not in KEYS:
        old = ("--restart-policy", "--restart_policy") if name == RESTART_POLICY else ()
        mixed = f"--ft-{name[3:]}" if name.startswith("ft_") else f"--{name}"
        return tuple(dict.fromkeys((f"--{dashed}", mixed, f"--{name}", *old)))
    also = ("--ft-storage-health-check-path", "--ft_storage_health_check_path")
    prefixes = ("--ft-", "--ft_", "--ft-param-", "--ft_param_")
    every = [prefix + form for prefix in prefixes for form in (dashed, name)]
    return tuple(dict.fromkeys((*every, *(also if name == "storage_healthcheck_path" else ()))))


@attrs.frozen
class Translation:
    """Values for our options, one line per name about what became of it, and what was wrong."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]
    problems: tuple[ConfigError, ...]


def translate_options(given: Mapping[str, Any], spelt: Mapping[str, str]) -> Translation:
    """Return our values for what the command line says of keys of the section, and of options of the launcher.

    `spelt` holds each option as it was written.
    """
    return translate(
        given,
        source="command line",
        name_of=lambda name: spelt.get(name, spellings(name)[0]),
        fields={**TRANSLATED, **OPTIONS_TRANSLATED},
        without={**WITHOUT_COUNTERPART, **OPTIONS_WITHOUT_COUNTERPART},
    )


def find_section(data: Any, source: str) -> Mapping[Any, Any] | None:
    """Return the `fault_tolerance:` mapping at any depth of `data`, or None; two of them are an error."""
    found = list(_sections(data, source))
    if len(found) > 1:
        raise ConfigError(f"{source}: has {len(found)} `{SECTION}:` sections; keep one")
    return found[0] if found else None


def _sections(data: Any, source: str) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, list):
        for item in data:
            yield from _sections(item, source)
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        if key != SECTION:
            yield from _sections(value, source)
        elif value is None or isinstance(value, Mapping):
            yield value or {}
        else:
            raise ConfigError(f"{source}: {SECTION} is {shown(value)}; expected `name: value` lines under it")


def translate(
    section: Mapping[Any, Any],
    *,
    source: str,
    name_of: Callable[[str], str] = str,
    fields: Mapping[str, str] = TRANSLATED,
    without: Mapping[str, str] = {**WITHOUT_COUNTERPART, **OF_FRAMEWORKS},
) -> Translation:
    """Return our values for a `fault_tolerance` mapping, with a note about every key.

    `name_of` spells a key as its writer did: an option or a YAML key. `fields` and `without` say what becomes of each.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[ConfigError] = []
    for raw_name, raw in section.items():
        name = str(raw_name)
        place, given = f"{source}: {name_of(name)}", f"{name_of(name)}={_shown(raw)}"
        if name in without:
            said = name_of(name) if raw is True else redact_text(given)
            notes.append(f"{said} has no counterpart: {without[name]}")
        elif name not in fields:
            what = f"unknown key of {SECTION} with value {shown(raw)}{nearest(name, list(KEYS))}"
            problems.append(ConfigError(f"{place}: {what}"))
        else:
            field = fields[name]
            try:
                values[field] = read_value(field, raw, source=place)
            except ConfigError as error:
                problems.append(error)
            else:
                notes.append(f"{given} became {field}={_meaning(values[field], raw)}")
    return Translation(values, tuple(notes), tuple(problems))


def _meaning(value: Any, raw: Any) -> str:
    if value is None:
        return "learned (here no deadline is ever without bound)"
    given = raw.items() if isinstance(raw, Mapping) else ()
    unset = [str(section) for section, timeout in given if parse.is_nothing(timeout)]
    return _shown(value) + (f"; learned: {', '.join(unset)}" if unset else "")


def say_notes(notes: tuple[str, ...], source: str) -> None:
    """Print, once per source, what became of each name."""
    if notes:
        lines = "\n".join(f"  {note}" for note in notes)
        say_once(f"nvrx:{source}", f"{source}: settings of NVIDIA's extension, translated:\n{lines}")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(item)}" for name, item in value.items()) or "{}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def provided_directory(asked_by: str) -> Path:
    """Return the directory that has the SDK under the names of NVIDIA's extension; `bin` in it has its launcher.

    Raises ConfigError, which names the option that asks, where the extension itself is installed: which of the two is
    meant must not depend on the order of a path.
    """
    adapters = find_spec("resilience_sdk.adapters")
    assert adapters is not None
    assert adapters.origin is not None
    place = Path(adapters.origin).parent / "nvrx" / "provided"
    real = find_spec(PACKAGE)
    places = [] if real is None else [real.origin] if real.origin else list(real.submodule_search_locations or ())
    if others := [path for path in places if path and not Path(path).resolve().is_relative_to(place.resolve())]:
        raise ConfigError(
            f"{asked_by}: {PACKAGE} itself is installed, in {others[0]}; `pip uninstall nvidia-resiliency-ext` to have "
            "the SDK in its place, or go on without this: its client then works under its own launcher alone"
        )
    return place
