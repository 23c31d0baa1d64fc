"""Every option, once: its default, how its value is read, and what it means.

The command line, the environment, configuration files and `docs/settings.md` are all derived from this class.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.core.json_records import to_values
from resilience_sdk.core.settings import parse
from resilience_sdk.errors import ConfigError

_SECONDS = "SECONDS"


def _default_dump_signal() -> int:
    """Return SIGRTMAX-3, which neither NCCL, Slurm nor users take; 0 (no dumps) where there is none."""
    if hasattr(signal, "SIGRTMAX"):
        return int(signal.SIGRTMAX) - 3
    return int(getattr(signal, "SIGUSR2", 0))


def _dump_signal(value: Any) -> int:
    # The default of a platform without signals must pass its own parser.
    return 0 if value == 0 and _default_dump_signal() == 0 else parse.signal_number(value)


def _option(default: Any, reader: parse.Parser, doc: str, metavar: str = "", shown: str = "") -> Any:
    """Declare one option; `shown` replaces the default in help texts where it alone says too little."""
    metadata = {"read": reader, "doc": doc, "metavar": metavar, "shown": shown}
    held = attrs.Factory(dict) if default == {} else default
    return attrs.field(default=held, metadata=metadata)


def _unset(reader: parse.Parser, doc: str, metavar: str = "", shown: str = "") -> Any:
    return _option(None, reader, doc, metavar, shown)


def _choice(default: str | None, words: tuple[str, ...], doc: str, shown: str = "") -> Any:
    """Declare one of some words, with `off` as the default of what YAML may read as false."""
    reader = parse.choice_or_off(*words) if default == "off" else parse.choice(*words, optional=default is None)
    names = ("off", *words) if default == "off" else words
    return _option(default, reader, doc, f"{{{','.join(names)}}}", shown)


def _learned(before: int, doc: str) -> Any:
    """Declare a deadline that is learned, where nobody sets it; `before` is what holds until then."""
    return _option(None, parse.learned_duration, doc, _SECONDS, f"learned; {before} before that")


def _seconds(default: float, doc: str) -> Any:
    return _option(default, parse.positive_duration, doc, _SECONDS)


def _seconds_or_zero(default: float, doc: str) -> Any:
    return _option(default, parse.duration_or_zero, doc, _SECONDS)


def _count(default: int, doc: str, least: int = 0) -> Any:
    return _option(default, parse.whole_number(least), doc, "N")


def _score(default: float, doc: str, shown: str = "") -> Any:
    return _option(default, parse.number_between(0, 1), doc, "SCORE", shown)


def _switch(default: bool, doc: str) -> Any:
    return _option(default, parse.switch, doc)


def _with_reader(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Make every option read its own value, with its own name in the error."""
    return [
        field.evolve(converter=_named_reader(field.name, field.metadata["read"])) if "read" in field.metadata else field
        for field in fields
    ]


def _named_reader(name: str, reader: parse.Parser) -> parse.Parser:
    def read(value: Any) -> Any:
        return read_value(name, value, reader=reader, source=f"setting {name}")

    return read


# Each names a sink of `resilience_sdk.telemetry`, as does `event_log`.
SINK_FIELDS = (
    "prometheus_address",
    "prometheus_textfile",
    "otlp_endpoint",
    "webhook_url",
    "tensorboard_dir",
    "wandb_project",
    "mlflow_uri",
    "db",
    "sinks",
)
# Neither may stand in a message, even where it is wrong: whoever knows them may read metrics or post events.
SECRET_FIELDS = frozenset({"prometheus_token", "webhook_url"})
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@attrs.frozen(kw_only=True, field_transformer=_with_reader)
class Settings:
    """The effective options of a run. Durations are seconds.

    Values are read as the loader reads them (`Settings(heartbeat_timeout="10min")`), so a bad one raises
    `ConfigError` here too.
    """

    run_dir: str | None = _unset(
        parse.path_text,
        "Directory that everything is written to. Naming it allows a later run to resume from it.",
        "DIR",
        "./resilience-runs/<scheduler's job, or script and time>",
    )
    on_hang: str | None = _choice(
        None,
        ("restart", "report", "kill"),
        "What a confirmed hang does: restart the ranks, only report it, or kill the stuck ranks so that a foreign "
        "launcher restarts by its own policy.",
        shown="restart under `resilience run`, else report",
    )
    initial_heartbeat_timeout: float | None = _learned(
        3600, "Deadline of the start-up, and of the first occurrence of every step and section."
    )
    heartbeat_timeout: float | None = _learned(
        600, "Deadline of one step. Set, it is the deadline: neither learned nor floored."
    )
    out_of_section_timeout: float | None = _learned(1800, "Deadline of the time outside any step and section.")
    timeout_floor: float = _seconds(30.0, "No learned deadline is below this.")
    section_timeouts: Mapping[str, float] = _option(
        {},
        parse.section_timeouts,
        "Deadlines by section name, such as `checkpoint:900,eval:600`. Sections that are not listed (or `null`) "
        "are learned.",
        "NAME:SECONDS,...",
        "learned",
    )
    safety_factor: float = _option(
        5.0,
        parse.number_between(1, math.inf),
        "Learned deadline = this factor times the high quantile of what was seen.",
        "FACTOR",
    )
    deadline_rule: str = _choice(
        "quantile",
        ("quantile", "nvrx"),
        "How deadlines are learned: from a high quantile of a sliding window, or as NVIDIA's extension does "
        "(factor times the maximum).",
    )
    stuck_after: float = _seconds(
        60.0,
        "A rank that is waited for and is stopped, or in which nothing moves, is called hung after this long, "
        "whatever its learned deadline is. Before its first step, and on a socket, pipe or idle child, 5 times as "
        "long.",
    )
    hang_cap: float = _seconds(
        3600.0,
        "How far beyond its deadline a rank that works may be before it is called hung; also how long ranks that "
        "nobody sees are waited for.",
    )
    dump_signal: int = _option(
        _default_dump_signal(),
        _dump_signal,
        "Signal, by name or number, that makes a rank write its stacks.",
        "SIGNAL",
        "SIGRTMAX-3",
    )
    dump_grace: float = _seconds_or_zero(2.0, "How long the collection of evidence may take.")
    term_grace: float = _seconds_or_zero(
        15.0, "From SIGTERM to SIGKILL when the launcher ends ranks on its own behalf."
    )
    exit_timeout: float | None = _unset(
        parse.optional_duration,
        "How long `resilience run` waits for a rank that has finished its training and whose process does not end, "
        "before it ends that process and counts the rank as finished.",
        _SECONDS,
        "without end; it is only reported",
    )
    monitor_interval: float = _seconds(
        0.5, "How often the monitor and the launcher look at least; half as often where all ranks come on."
    )
    max_restarts: int = _count(3, "How often the ranks are started again inside one job.")
    wait_limit: float = _seconds_or_zero(
        300.0,
        "How long a restart, and the last save of a training, waits for what failed (a full disk, a name that does not "
        "resolve) to work again.",
    )
    max_job_retries: int = _count(2, "How often `resilience supervise` starts the whole job again.")
    straggler_detection: bool = _switch(True, "Compare the ranks' durations, and say who is slow.")
    straggler_role: str | None = _unset(
        parse.plain_name,
        "What this node's ranks do, where that differs between ranks: only ranks of one role are compared.",
        "NAME",
        "one role",
    )
    report_interval: float = _seconds(300.0, "Time between two straggler reports.")
    kernels_every: float | None = _unset(
        parse.optional_duration,
        "On CUDA, time the GPU kernels of one step every so many seconds, for the scores of GPUs; 0 never does. What "
        "it costs is printed, and kept below 1 %.",
        _SECONDS,
        "never, with `StragglerDetectionCallback` 3 times per report",
    )
    relative_threshold: float = _score(0.7, "A rank whose score against the fastest rank is below this is a straggler.")
    individual_threshold: float = _score(0.7, "A rank whose score against its own best is below this is a straggler.")
    scores_to_print: int = _count(5, "How many of the best and worst scores a report prints.")
    stop_if_detected: bool = _switch(False, "Stop the job when a persistent straggler is found.")
    stop_below_relative: float = _score(
        0.0,
        "Stop the job when a report has a rank whose score as a whole against the fastest rank is below this.",
        shown="never",
    )
    stop_below_individual: float = _score(
        0.0,
        "Stop the job when a report has a rank whose score as a whole against its own best is below this.",
        shown="never",
    )
    preempt_signals: tuple[str, ...] = _option(
        ("SIGTERM",), parse.signal_names, "Signals that mean: save and leave.", "SIGNAL,...", "SIGTERM"
    )
    preempt_time: float = _seconds_or_zero(
        60.0, "Time from a preemption notice to the end, where the scheduler does not tell."
    )
    cloud_notices: str = _choice(
        "off",
        ("aws", "gcp", "azure"),
        "Cloud whose metadata service is asked whether it is about to take the machine away.",
    )
    cloud_endpoint: str | None = _unset(
        parse.base_url, "Address of that service, where it is not the cloud's own.", "URL", "http://169.254.169.254"
    )
    checkpoint_every: str | int = _option(
        "auto",
        parse.checkpoint_every,
        "Time between two checkpoints: `auto`, a number of steps, or a duration with its unit such as `10min`.",
        "auto|STEPS|DURATION",
    )
    checkpoint_keep: int = _count(
        2, "How many good checkpoints are kept; never fewer than two, so that a bad one has a predecessor.", least=2
    )
    checkpoint_async: bool = _switch(
        False,
        "Write checkpoints in a thread while the training goes on; takes as much memory of the host as the state has.",
    )
    resume_check: str = _option(
        "auto",
        parse.choice_or_off("auto"),
        "Compare a resume with what went before it: the state with digests of the save, what is read again of the "
        "data, steps that are done twice.",
        "{auto,off}",
    )
    numerics: str = _option(
        "warn",
        parse.choice_or_off("warn", "rollback", "raise"),
        "What adapters do about a loss that is NaN, infinite or a spike: write an incident, go back to the checkpoint "
        "before it too, or raise.",
        "{off,warn,rollback,raise}",
    )
    rollback_skip_batches: int = _count(
        1, "How many batches, from the bad one on, are left out after `numerics.check` has rolled the run back."
    )
    group_readable: bool = _switch(False, "Let the group read the run directory (mode 0750 instead of 0700).")
    report: bool = _switch(False, "Write the page of `resilience report` into the run directory as a job ends.")
    prometheus_address: tuple[str, int] | None = _unset(
        parse.listen_address,
        "Where each node serves its metrics to Prometheus; a port alone is served on the node itself only.",
        "[HOST:]PORT",
        "not served",
    )
    prometheus_token: str | None = _unset(
        parse.token,
        "What a scrape has to bring along as `Authorization: Bearer`; `none` serves other hosts without one.",
        "TOKEN",
        "none on the node itself; needed to serve other hosts",
    )
    prometheus_textfile: str | None = _unset(
        parse.path_text,
        "Directory of the node exporter's textfile collector, which the metrics are written into.",
        "DIR",
        "not written",
    )
    otlp_endpoint: str | None = _unset(
        parse.base_url,
        "OpenTelemetry collector (OTLP over HTTP) that metrics and spans are sent to.",
        "URL",
        "not sent",
    )
    webhook_url: str | None = _unset(
        parse.web_address,
        "Address that events are posted to as JSON. Never printed: whoever knows it may post there.",
        "URL",
        "not posted",
    )
    webhook_events: tuple[str, ...] = _option(
        ("incident", "recovered", "preempt_notice", "stop_agreed", "ckpt_fail", "degraded", "finished"),
        parse.event_names,
        "Which events are posted.",
        "EVENT,...",
        "incident,recovered,preempt_notice,stop_agreed,ckpt_fail,degraded,finished",
    )
    tensorboard_dir: str | None = _unset(
        parse.path_text, "Directory that TensorBoard's event files are written into.", "DIR", "none"
    )
    wandb_project: str | None = _unset(
        parse.plain_name, "Project of Weights & Biases that a run per node is made in.", shown="none"
    )
    mlflow_uri: str | None = _unset(
        parse.tracking_uri,
        "Where MLflow tracks (server, database or directory); a run per node is made there.",
        "URI",
        "none",
    )
    db: str | None = _unset(
        parse.database,
        "Index of the history that this run is taken into while it runs: a file, or a URL such as "
        "postgresql://user@host/database.",
        "URL",
        "none",
    )
    sinks: Mapping[str, str] | None = _unset(
        parse.named_addresses,
        "More sinks by their name, each with its address: of a file in `telemetry/sinks`, of an installed package, or "
        "`module:Class`.",
        "NAME=ADDRESS,...",
        "none",
    )
    event_log: str = _choice(
        "off", ("text", "json"), "Print every event on standard error, for people or for what collects logs."
    )
    telemetry_interval: float = _seconds(
        15.0, "How often metrics are pushed, written and drawn; events are told at once."
    )
    health_interval: float = _seconds_or_zero(
        60.0,
        "Time between two looks at the node's hardware while a job runs, longer where they would cost more than 1 "
        "% of a core; 0 switches them off.",
    )
    # Where each value that somebody set came from; `doctor` prints it. Not an option.
    sources: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.dump_signal and parse.signal_name(self.dump_signal) in self.preempt_signals:
            name = parse.signal_name(self.dump_signal)
            raise ConfigError(
                f"{name} is both dump_signal and in preempt_signals; choose another signal for one of them"
            )
        address = self.prometheus_address
        if address is not None and address[0] not in _LOOPBACK and self.prometheus_token is None:
            raise ConfigError(
                f"prometheus_address {address[0]}:{address[1]} serves other hosts, without a token: set "
                f"prometheus_token, or set it to `none` where everybody may read the metrics"
            )

    @property
    def explicit(self) -> frozenset[str]:
        """Return the names of the options that somebody set, or that differ from their default."""
        changed = {name for name, field in FIELDS.items() if getattr(self, name) != default_of(field)}
        return frozenset(changed | set(self.sources))

    @property
    def asks_for_telemetry(self) -> bool:
        """Whether a sink is named, so that each node needs an exporter."""
        return self.event_log != "off" or any(getattr(self, name) is not None for name in SINK_FIELDS)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `settings_from_json` makes an equal value."""
        return to_values(self)


FIELDS: Mapping[str, attrs.Attribute[Any]] = {
    field.name: field for field in attrs.fields(Settings) if "read" in field.metadata
}


def settings_from_json(data: Mapping[str, Any]) -> Settings:
    """Return the settings that `Settings.to_json` described; raise `ConfigError` for anything else."""
    if not isinstance(data, Mapping):
        raise ConfigError("settings: expected a JSON object")
    values = dict(data)
    sources = values.pop("sources", {})
    if unknown := sorted(set(values) - set(FIELDS)):
        raise ConfigError(f"settings: unknown key {unknown[0]!r}{nearest(unknown[0], FIELDS)}")
    if not isinstance(sources, Mapping):
        raise ConfigError("settings: expected `sources` to be a JSON object")
    return Settings(**values, sources={str(name): str(source) for name, source in sources.items()})


def read_value(name: str, value: Any, *, source: str, reader: parse.Parser | None = None) -> Any:
    """Return the canonical value of option `name`; `ConfigError` names `source`, value and the cure."""
    try:
        return (reader or FIELDS[name].metadata["read"])(value)
    except ValueError as error:
        given = "what was given (not shown: it is a secret)" if name in SECRET_FIELDS else parse.shown(value)
        raise ConfigError(f"{source}: {error}, not {given}") from None


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return `; did you mean X?` for the known name that looks most like `name`, or an empty text."""
    import difflib  # on the way to an error only: the monitor must stay small

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def default_of(field: attrs.Attribute[Any]) -> Any:
    """Return the default of an option, in its canonical form."""
    default = field.default
    return {} if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


def shown_default(field: attrs.Attribute[Any]) -> str:
    """Return the default of an option as help texts and the documentation print it."""
    value = default_of(field)
    if shown := field.metadata["shown"]:
        return str(shown)
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
