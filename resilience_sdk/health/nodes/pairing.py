"""Which nodes try a reduction with which, and what follows for each of them. Pure.

The first round pairs neighbours. A pair that goes well clears both its nodes; one that fails, or is slow, makes two
suspects. The second round pairs each suspect with a node that is cleared: who goes well now was only beside the bad
one. The idea is that of DLRover's node check. Further rounds come only where the second leaves something open: three
nodes (all three pairs are tried), an odd one out, more suspects than cleared nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

import attrs

SLOW = 2.0  # times what others need: links and clocks of sound nodes differ by less, so DLRover's ratio
# Beyond what others need. gloo: on a busy machine a sound pair was seen 11 ms above another. NCCL moves its 256 MiB
# within milliseconds and by no processor, so that all of half a link's speed would hide in as much.
LEAST_S = {"gloo": 0.05, "nccl": 0.002}
MOST_ROUNDS = 6
_TIMES = 2  # a node is named when it went wrong so often, and never well

Pair = tuple[int, int]


@attrs.frozen
class Trial:
    """What came of a pair. Nodes are numbers.

    `seconds` is what one reduction took, None where none came about (`why` then says what happened). `rates` holds,
    by node, how many products of two matrices it computed per second, of its slowest device, and `models` what that
    device is.
    """

    round: int
    pair: Pair
    seconds: float | None
    why: str = ""
    rates: Mapping[int, float] = attrs.field(factory=dict)
    models: Mapping[int, str] = attrs.field(factory=dict)
    backend: str = "gloo"

    @property
    def kind(self) -> tuple[str, ...]:
        """Which reductions take as long: those by the same backend, and of GPUs those among the same models."""
        models = () if self.backend == "gloo" else sorted(self.models.get(node, "") for node in self.pair)
        return (self.backend, *models)


@attrs.frozen
class Standing:
    """What the trials say of each node.

    `cleared`: went well in a pair. `failing`, `slow`: their reductions fail or are slow with whomever, among them
    nodes that are cleared. `computes_slowly`: in each round in which they took part. `open`: none of these.
    `ways`: pairs that failed though both nodes are cleared.
    """

    cleared: frozenset[int]
    failing: frozenset[int]
    slow: frozenset[int]
    computes_slowly: frozenset[int]
    open: frozenset[int]
    ways: tuple[Pair, ...]

    @property
    def bad(self) -> frozenset[int]:
        """All that should be left out."""
        return self.failing | self.slow | self.computes_slowly


def usual_seconds(trials: Iterable[Trial]) -> dict[tuple[str, ...], float]:
    """Return, by kind, what a reduction takes among sound nodes: the lower quartile, which few bad ones do not move."""
    taken: dict[tuple[str, ...], list[float]] = {}
    for trial in trials:
        if trial.seconds is not None:
            taken.setdefault(trial.kind, []).append(trial.seconds)
    return {kind: sorted(values)[(len(values) - 1) // 4] for kind, values in taken.items()}


def usual_rates(trials: Iterable[Trial], round_: int) -> dict[str, float]:
    """Return, by model, how many products a sound node computes per second in a round: the upper quartile."""
    rates: dict[str, list[float]] = {}
    for trial in trials:
        if trial.round == round_:
            for node, rate in trial.rates.items():
                rates.setdefault(trial.models.get(node, ""), []).append(rate)
    return {model: sorted(values, reverse=True)[(len(values) - 1) // 4] for model, values in rates.items()}


def is_slow(trial: Trial, usual: Mapping[tuple[str, ...], float]) -> bool:
    """Tell whether a reduction took much longer than others of its kind do."""
    least = usual.get(trial.kind)
    if trial.seconds is None or least is None:
        return False
    return trial.seconds > max(SLOW * least, least + LEAST_S[trial.backend])


def judge(nodes: Iterable[int], trials: Sequence[Trial]) -> Standing:
    """Return what is known of the nodes after these trials."""
    usual, everybody = usual_seconds(trials), frozenset(nodes)
    went_wrong = [trial for trial in trials if trial.seconds is None or is_slow(trial, usual)]
    cleared = frozenset(node for trial in trials if trial not in went_wrong for node in trial.pair)
    failing: set[int] = set()
    slow: set[int] = set()
    for node in everybody - cleared:
        partners = {_other(trial.pair, node): trial for trial in went_wrong if node in trial.pair}
        telling = [trial for partner, trial in partners.items() if partner in cleared]
        if len(partners) >= _TIMES and telling:
            (failing if any(trial.seconds is None for trial in telling) else slow).add(node)
    slowly = frozenset(node for node, times in _slow_rounds(trials).items() if times >= _TIMES) & everybody
    named = failing | slow | slowly
    return Standing(
        cleared=cleared - named,
        failing=frozenset(failing),
        slow=frozenset(slow),
        computes_slowly=slowly,
        open=everybody - cleared - named,
        ways=tuple(trial.pair for trial in went_wrong if trial.seconds is None and cleared.issuperset(trial.pair)),
    )


def next_pairs(nodes: Iterable[int], trials: Sequence[Trial]) -> tuple[Pair, ...]:
    """Return who tries with whom in the next round; nothing where all is known, or no more can be."""
    everybody = sorted(nodes)
    if not trials:
        return tuple(zip(everybody[::2], everybody[1::2], strict=False))
    if max(trial.round for trial in trials) + 1 >= MOST_ROUNDS:
        return ()
    standing, tried = judge(everybody, trials), {trial.pair for trial in trials}
    again = {node for node, times in _slow_rounds(trials).items() if times < _TIMES}
    if len(everybody) <= 3:  # nobody else is there to compare with
        pairs = list(itertools.combinations(everybody, 2))
        untried = [pair for pair in pairs if pair not in tried]
        return tuple(untried or [pair for pair in pairs if again.intersection(pair)])[:1]
    wanting = sorted(again | standing.open)
    return _matched(wanting, sorted(standing.cleared - again), tried) or _matched(wanting, wanting, tried)


def _matched(wanting: Sequence[int], partners: Sequence[int], tried: Set[Pair]) -> tuple[Pair, ...]:
    """Give each node that wants one a partner of its own with which it was not tried yet, as far as there are any."""
    pairs: list[Pair] = []
    taken: set[int] = set()
    for node in wanting:
        free = (other for other in partners if other not in taken and other != node and node not in taken)
        partner = next((other for other in free if _pair(node, other) not in tried), None)
        if partner is not None:
            pairs.append(_pair(node, partner))
            taken |= {node, partner}
    return tuple(pairs)


def _slow_rounds(trials: Sequence[Trial]) -> dict[int, int]:
    """Return, for each node that computed slowly in every round it took part in, in how many."""
    usual = {round_: usual_rates(trials, round_) for round_ in {trial.round for trial in trials}}
    marks: dict[int, list[bool]] = {}
    for trial in trials:
        for node, rate in trial.rates.items():
            marks.setdefault(node, []).append(rate * SLOW < usual[trial.round][trial.models.get(node, "")])
    return {node: len(slow) for node, slow in marks.items() if all(slow)}


def _pair(node: int, other: int) -> Pair:
    return min(node, other), max(node, other)


def _other(pair: Pair, node: int) -> int:
    return pair[1] if pair[0] == node else pair[0]
