"""The first death: who died first of its own, and who only followed. Pure; the order of the input never matters.

How a process ended says little about why: an abort is how many things end. What its log or the kernel says takes
its place where the taxonomy has it explain such an end, or where the end alone is a mere guess; else it is quoted
beside it, and makes it surer where both say the same.

Exit codes arrive in the order in which a launcher happens to poll, and teardown takes longer for some ranks
than for others, so the first exit is often a victim's. A rank is a victim when its exception only says that
a peer is gone, or when it died by the launcher's own signal. Among the rest the earliest is the culprit.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

import attrs

from resilience_sdk.attribution.exceptions import ExceptionRecord, fingerprint, own_exception
from resilience_sdk.attribution.exits import Classification, classification, classify_exit, describe_exit
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.incidents.record import Evidence

VAGUE = 0.5
"""Confidence up to which a cause is a guess that anything more certain replaces."""
_AGREED = 0.05
_MOST_SURE = 0.97


def weigh(own: Classification, told: Iterable[Classification]) -> Classification:
    """Return what the death of one process was, from how it ended and what others say about it.

    A process that only missed its peers (`symptom`) stays one unless something explains it otherwise.
    """
    for other in told:
        own = _weigh_one(own, other)
    return own


def _weigh_one(own: Classification, other: Classification) -> Classification:
    if other.cause == own.cause:
        sure = min(_MOST_SURE, max(own.confidence, other.confidence) + _AGREED)
        measured = own.measured or other.measured
        return attrs.evolve(own, confidence=sure, evidence=(*own.evidence, *other.evidence), measured=measured)
    explains = not other.symptom and own.cause in lookup(other.cause).explains
    guess = not own.symptom and own.confidence <= VAGUE and other.confidence > own.confidence
    if explains or guess:
        return attrs.evolve(other, evidence=(*other.evidence, *own.evidence))
    return own if other.symptom else attrs.evolve(own, evidence=(*own.evidence, *other.evidence[:1]))


HEARSAY = 0.5
"""Confidence up to which the words of a program that blame a node are believed."""
_OWN_WORDS = 0.8  # as of any exception of the program


def only_measured(
    found: FirstDeath, looked: Iterable[Classification], *, is_asked: bool, seen: str, is_own: bool = False
) -> FirstDeath:
    """Return the verdict as it may be acted on: words of a program cost nobody a node.

    Args:
        found: The verdict, by whatever was said.
        looked: What the look at the node has found that it started, and what was measured there while the job ran.
        is_asked: Whether a rank has asked through the API that its node is left out.
        seen: What was looked at, in words; empty where nothing was.
        is_own: Whether the program itself has raised what says so: a parser of logs may quote a device.
    """
    known = found.classification
    if not known.leaves_node_out or known.measured or is_asked:
        return found
    fitting = sorted((one for one in looked if one.leaves_node_out), key=lambda one: not _fits(one, known))
    if fitting:
        other = fitting[0]
        sure = min(_MOST_SURE, other.confidence + _AGREED)
        believed = attrs.evolve(
            known if _fits(other, known) else other,
            confidence=sure,
            evidence=(*other.evidence, *known.evidence),
            measured=True,
        )
        return attrs.evolve(found, classification=believed)
    told = Evidence(
        "look", f"{seen or 'the node could not be looked at'}: the node is not left out for words of a program alone"
    )
    if is_own:
        return attrs.evolve(found, classification=classification("user_code_error", _OWN_WORDS, *known.evidence, told))
    confidence, evidence = min(known.confidence, HEARSAY), (*known.evidence, told)
    known = attrs.evolve(known, action="restart", confidence=confidence, evidence=evidence)
    return attrs.evolve(found, classification=known)


def _fits(measured: Classification, said: Classification) -> bool:
    """Tell whether what was measured is what the words say, or vaguer: a device is faulty, the program tells how."""
    return measured.cause == said.cause or measured.cause in lookup(said.cause).explains


_LAUNCHERS_SIGNALS = (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGCONT, -signal.SIGINT)
_UNEVEN_CONFIDENCE = 0.6
_SYMPTOMS_ONLY_CONFIDENCE = 0.3
ABORT_AT_EXIT = "abort_at_exit"
_ABORT_CONFIDENCE = 0.9
_SHUTDOWN_NS = 2_000_000_000
"""How long after a peer noticed it the process of a rank that finished may end: its connections close first."""


@attrs.frozen
class Death:
    """The end of one rank as its launcher saw it. `t_ns`: monotonic clock of this host, exact or polled.

    `told`: what its log and the kernel say of this very process.
    """

    rank: int
    exit_code: int | None
    exception: ExceptionRecord | None
    t_ns: int
    cgroup_oom: bool | None = None
    told: tuple[Classification, ...] = ()
    group_left: bool | None = None
    """Whether torch's process group was still there when the script had ended; None where it had not ended."""


@attrs.frozen
class FirstDeath:
    """The verdict over one attempt's deaths; `culprits` is empty when only symptoms were seen."""

    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    classification: Classification


def find_first_death(
    deaths: Iterable[Death], *, ending_ns: int | None = None, node_told: Iterable[Classification] = ()
) -> FirstDeath:
    """Tell culprits from victims.

    Args:
        deaths: Every rank that ended, in any order, those that ended well included.
        ending_ns: When the launcher began to end its ranks: deaths by its signals from then on, and exits
            without an exception, are no fault of the rank. None when it sent nothing.
        node_told: What is known of the node or the job and of no process: a GPU that fell off the bus, a log
            that all ranks write into. It can explain how the culprit died; it names nobody else.
    """
    found = _find(deaths, ending_ns)
    if found.classification.category == "none":
        return found
    known = found.classification
    if not found.culprits and known.symptom:
        known = attrs.evolve(known, symptom=False)  # whoever is missed, the node may tell why
    return attrs.evolve(found, classification=weigh(known, (one for one in node_told if not one.symptom)))


def _find(deaths: Iterable[Death], ending_ns: int | None) -> FirstDeath:
    deaths = (attrs.evolve(death, exception=own_exception(death.exception)) for death in deaths)
    ordered = sorted(deaths, key=lambda death: (death.t_ns, death.rank))
    judged = {death.rank: _classify(death) for death in ordered}
    real = [death for death in ordered if _is_real(death, judged[death.rank], ending_ns)]
    if real:
        return _verdict(ordered, *_first_of(real, judged))
    asked_to_leave = [death for death in ordered if death.exit_code == EXIT_PREEMPTED]
    if asked_to_leave:
        return FirstDeath((), (), judged[asked_to_leave[0].rank])
    symptoms = [death for death in ordered if judged[death.rank].symptom]
    if not symptoms:
        return FirstDeath((), _failed(ordered), _nothing_seen(ordered))
    finished = [d for d in ordered if d.exit_code == 0 and _had_finished(d, symptoms[0].t_ns, ending_ns)]
    if finished:
        return _verdict(ordered, finished, _uneven(finished, judged[symptoms[0].rank]))
    return FirstDeath((), _failed(ordered), _symptoms_only(judged[symptoms[0].rank]))


def _had_finished(death: Death, noticed_ns: int, ending_ns: int | None) -> bool:
    """Tell whether a rank that exited with 0 was done before its peers lost it.

    An exit with 0 after the launcher's signal may be the answer of the script's own handler.
    """
    latest_ns = noticed_ns + _SHUTDOWN_NS
    if ending_ns is not None:
        latest_ns = min(latest_ns, ending_ns)
    return death.t_ns <= max(noticed_ns, latest_ns)


def _classify(death: Death) -> Classification:
    if death.exit_code == -signal.SIGABRT and death.group_left is not None:
        told = Evidence("exit", "it died by SIGABRT after its script had ended")
        return classification(ABORT_AT_EXIT, _ABORT_CONFIDENCE if death.group_left else VAGUE, told)
    return weigh(classify_exit(death.exit_code, death.exception, death.cgroup_oom), death.told)


def _is_real(death: Death, judged: Classification, ending_ns: int | None) -> bool:
    """Tell whether the rank died of something of its own."""
    if judged.symptom or death.exit_code in (0, EXIT_PREEMPTED):
        return False
    if ending_ns is None or death.t_ns < ending_ns:
        return True
    # After the launcher's signal only an exception is still worth something: it was raised before, and its
    # process took long to die. But a signal turned into an exception (KeyboardInterrupt) is the launcher's.
    if death.exit_code in _LAUNCHERS_SIGNALS and not death.exception:
        return False
    return death.exception is not None and judged.category != "scheduler"


def _first_of(real: list[Death], judged: dict[int, Classification]) -> tuple[list[Death], Classification]:
    """Return the earliest death, everyone who died of the same, and what it was.

    Deaths of one poll have one time; the surest of them speaks. Ranks that raised the same exception share
    the fault however late they were; so do those that died in the same way in the same poll.
    """
    earliest = [death for death in real if death.t_ns == real[0].t_ns]
    first = max(earliest, key=lambda death: (judged[death.rank].confidence, -death.rank))
    verdict = judged[first.rank]
    if first.exception:
        same = fingerprint(first.exception)
        shared = [d for d in real if d.exception and fingerprint(d.exception) == same]
    else:
        shared = [d for d in earliest if not d.exception and judged[d.rank].cause == verdict.cause]
    who = Evidence("order", f"rank {first.rank} was the first to die of its own: it {describe_exit(first.exit_code)}")
    return shared, attrs.evolve(verdict, evidence=(who, *verdict.evidence))


def _verdict(ordered: list[Death], culprits: list[Death], verdict: Classification) -> FirstDeath:
    ranks = {death.rank for death in culprits}
    return FirstDeath(tuple(sorted(ranks)), tuple(r for r in _failed(ordered) if r not in ranks), verdict)


def _failed(ordered: list[Death]) -> tuple[int, ...]:
    return tuple(sorted(d.rank for d in ordered if d.exit_code not in (0, EXIT_PREEMPTED)))


def _uneven(finished: list[Death], symptom: Classification) -> Classification:
    ranks = ", ".join(str(death.rank) for death in finished)
    told = Evidence("order", f"rank {ranks} had finished with code 0 while others were still communicating")
    return classification("user_uneven_inputs", _UNEVEN_CONFIDENCE, told, *symptom.evidence)


def _symptoms_only(symptom: Classification) -> Classification:
    told = Evidence("order", "every rank here only lost its peers; the first fault is not among them")
    confidence = min(symptom.confidence, _SYMPTOMS_ONLY_CONFIDENCE)
    return attrs.evolve(symptom, confidence=confidence, evidence=(told, *symptom.evidence))


def _nothing_seen(ordered: list[Death]) -> Classification:
    if ordered and all(death.exit_code == 0 for death in ordered):
        return classification("no_fault", 0.9, Evidence("exit", "every rank exited with code 0"))
    return classification("unknown", 0.1, Evidence("order", "no rank died of its own"))
