"""How the nodes agree: each tells what it has seen, one concludes, and what stands first in the store counts.

Rounds follow one another by *words*, each made by `compare_set`: the plan of a round with all trials before it, and at
last the verdict. The first node makes them, so that a thousand nodes do not read a thousand reports each; where it
does not, whoever has waited long enough does, and only one of them succeeds. Every wait has an end.

The meeting as a whole ends by one more such key: with the last word's verdict, or because a node had to give up. What
stands there first holds for all, also for a node that knew better, or whose process was gone by then (its launcher
asks that key): if one started its ranks and another did not, the job would wait for itself.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from resilience_sdk.health.findings import finding_from_json
from resilience_sdk.health.nodes.pairing import MOST_ROUNDS, Pair, Trial, next_pairs
from resilience_sdk.health.nodes.reduce import limit_of
from resilience_sdk.health.nodes.verdict import Refusal, Report, from_reports, from_trials, together

REPORT_S = 60.0  # for the slowest node to load torch and to tell what it has
_TAKE_OVER_S = 10.0  # beyond what the first node may take
_LET_READ_S = 5.0
_LAST_READ_S = 0.1
_POLL_S, _MOST_POLL_S = 0.02, 0.25


class OverError(Exception):
    """The meeting has ended meanwhile."""


@attrs.frozen
class State:
    """What is agreed on before a round: who has reported, who takes part, who does not answer any more, what was tried
    so far, and the next pairs.
    """

    reported: tuple[int, ...]
    nodes: tuple[int, ...]
    silent: tuple[int, ...] = ()
    trials: tuple[Trial, ...] = ()
    pairs: tuple[Pair, ...] = ()

    @property
    def listening(self) -> tuple[int, ...]:
        """Who still follows, those that are left out for what they reported among them."""
        return tuple(node for node in self.reported if node not in self.silent)


class Conference:
    """One node's part in it. Raises what the store raises."""

    def __init__(
        self,
        store: Any,
        node: int,
        names: Sequence[str],
        report: Mapping[str, Any],
        *,
        spare: int,
        try_pair: Callable[[int, Pair, Mapping[int, Report]], Mapping[str, Any]],
        report_s: float = REPORT_S,
        round_s: float | None = None,
        end: str = "end",
    ) -> None:
        """Take part as number `node` of the nodes of these names; `spare` are those that the job can do without.

        `report` is what `read_report` reads; `try_pair` does this node's part of a trial in a round, and returns what
        `reduce.take_part` does. `round_s` overrides what a round may take, `end` is the key of the meeting's end.
        """
        self._store = store
        self._node = node
        self._names = names
        self._report = report
        self._spare = spare
        self._try_pair = try_pair
        self._report_s, self._round_s = report_s, round_s
        self._end = end

    def hold(self) -> dict[str, Any]:
        """Return how the meeting ended, as JSON values: its `verdict`, or why it is `broken`, so that nothing follows.

        The verdict is that of `Verdict.to_json` with `holds_store`, the nodes that hold the store of the rendezvous.
        """
        try:
            word = self._confer()
        except OverError:
            word = json.loads(self._store.get(self._end))
        else:
            word = self._close({"verdict": word["verdict"], "listening": read_state(word).listening})
        if "broken" not in word:
            self._let_read(word["listening"])
        return word

    def give_up(self, why: str) -> dict[str, Any]:
        """End the meeting, as this node's part failed for a mistake of ours; return how it ended, as `hold` does."""
        return self._close({"broken": f"{self._names[self._node]}: {why}"})

    def _close(self, word: Mapping[str, Any]) -> dict[str, Any]:
        return dict(json.loads(self._store.compare_set(self._end, "", json.dumps(word))))

    def _confer(self) -> dict[str, Any]:
        """Return the last word.

        Raises:
            OverError: The meeting has ended before.
        """
        self._tell("report", self._report)
        word = self._agree(0, 0, self._open, self._report_s)
        for number in range(2 * MOST_ROUNDS):
            if "verdict" in word:
                break
            state = read_state(word)
            for pair in state.pairs:
                if self._node in pair:
                    self._tell(f"trial/{number}", self._try_pair(number, pair, self._reports(pair)))
            conclude = partial(self._go_on, state, number)
            word = self._agree(number + 1, min(state.listening), conclude, float(word["limit_s"]))
        return word

    def _open(self, limit_s: float) -> dict[str, Any]:
        """Return the first word: the verdict where the reports are enough for one, else the first pairs."""
        reported = tuple(self._gather("report", range(len(self._names)), limit_s))
        verdict = from_reports(self._names, self._reports(reported))
        nodes = tuple(node for node in reported if node not in verdict.leave_out)
        over = bool(verdict.stop) or len(verdict.leave_out) > self._spare
        return self._word(State(reported, nodes, pairs=() if over else next_pairs(nodes, ())))

    def _go_on(self, state: State, number: int, limit_s: float) -> dict[str, Any]:
        """Return the word after a round: the next pairs, or the verdict."""
        asked = [node for pair in state.pairs for node in pair]
        told = self._gather(f"trial/{number}", asked, limit_s)
        lost = tuple(node for node in asked if node not in told)
        nodes = tuple(node for node in state.nodes if node not in lost)
        held = tuple(trial_of(number, pair, told) for pair in state.pairs if not set(pair) & set(lost))
        trials = (*state.trials, *held)
        return self._word(State(state.reported, nodes, (*state.silent, *lost), trials, next_pairs(nodes, trials)))

    def _word(self, state: State) -> dict[str, Any]:
        word, reports = attrs.asdict(state), self._reports(state.reported)
        if state.pairs:
            word["limit_s"] = self._round_s or max(limit_of(pair, reports) for pair in state.pairs)
            return word
        before = from_reports(self._names, reports)
        after = from_trials(self._names, state.nodes, state.silent, state.trials)
        held = [node for node, report in reports.items() if report.holds_store]
        word["verdict"] = {**together(before, after).to_json(), "holds_store": held}
        return word

    def _agree(self, number: int, first: int, conclude: Callable[[float], Any], limit_s: float) -> dict[str, Any]:
        """Return the word of that number; make it where it is this node's turn, or nobody else does."""
        key = f"word/{number}"
        is_turn = self._node == first
        if not is_turn and self._wait([key], limit_s + _TAKE_OVER_S):
            return dict(json.loads(self._store.get(key)))
        word: dict[str, Any] = conclude(limit_s if is_turn else 0.0)
        return dict(json.loads(self._store.compare_set(key, "", json.dumps(word))))

    def _tell(self, what: str, data: Mapping[str, Any]) -> None:
        self._store.set(f"{what}/{self._node}", json.dumps(dict(data)))

    def _gather(self, what: str, nodes: Iterable[int], limit_s: float = 0.0) -> dict[int, Any]:
        """Return what these nodes tell, by node; those that do not tell it in time are missing."""
        keys = {node: f"{what}/{node}" for node in nodes}
        if not self._wait(list(keys.values()), limit_s):
            keys = {node: key for node, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {node: json.loads(value) for node, value in zip(keys, values, strict=True)}

    def _reports(self, nodes: Iterable[int]) -> dict[int, Report]:
        return {node: read_report(data) for node, data in self._gather("report", nodes).items()}

    def _wait(self, keys: list[str], limit_s: float) -> bool:
        """Wait until all keys exist, and tell whether they do. Asks, as a `wait` of torch's could not be given up.

        Raises:
            OverError: The meeting has ended.
        """
        ends, pause_s = time.monotonic() + limit_s, _POLL_S
        while not self._store.check(keys):
            if self._store.check([self._end]):
                raise OverError
            if time.monotonic() > ends:
                return False
            time.sleep(pause_s)
            pause_s = min(_MOST_POLL_S, 1.5 * pause_s)
        return True

    def _let_read(self, listening: Iterable[int]) -> None:
        """Wait a moment until all others have read the end: the store may go with one of the launchers."""
        with contextlib.suppress(Exception):  # it has gone: what was read holds
            self._store.set(f"read/{self._node}", "1")
            ends = time.monotonic() + _LET_READ_S
            while not self._store.check([f"read/{node}" for node in listening]) and time.monotonic() < ends:
                time.sleep(_POLL_S)
            time.sleep(_LAST_READ_S)  # nobody knows who has the store: the others read this last key, too


def trial_of(number: int, pair: Pair, told: Mapping[int, Mapping[str, Any]]) -> Trial:
    """Return what came of a pair from what its two nodes tell. Pure."""
    seconds = [told[node]["seconds"] for node in pair]
    whys = dict.fromkeys(str(told[node]["why"]) for node in pair if told[node]["why"])
    rates = {node: float(told[node]["rate"]) for node in pair if told[node]["rate"] is not None}
    return Trial(
        round=number,
        pair=pair,
        seconds=None if None in seconds else max(map(float, seconds)),
        why="; ".join(whys),
        rates=rates,
        models={node: str(told[node]["model"]) for node in pair},
        backend=str(told[pair[0]]["backend"]),
    )


def read_report(data: Mapping[str, Any]) -> Report:
    """Return what a node told of itself."""
    refusal = data["refusal"]
    return Report(
        findings=tuple(finding_from_json(finding) for finding in data["findings"]),
        refusal=None if refusal is None else Refusal(str(refusal["reason"]), bool(refusal["of_the_node"])),
        devices=tuple(map(str, data["devices"])),
        holds_store=bool(data["holds_store"]),
    )


def read_state(word: Mapping[str, Any]) -> State:
    """Return the state in a word."""
    trials = tuple(
        Trial(
            round=told["round"],
            pair=tuple(told["pair"]),
            seconds=told["seconds"],
            why=told["why"],
            rates={int(node): rate for node, rate in told["rates"].items()},
            models={int(node): model for node, model in told["models"].items()},
            backend=told["backend"],
        )
        for told in word["trials"]
    )
    pairs = tuple((first, second) for first, second in word["pairs"])
    return State(tuple(word["reported"]), tuple(word["nodes"]), tuple(word["silent"]), trials, pairs)
