"""The generators that objects of a training hold: saved by each rank, and set again as they were at the save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resilience_sdk.checkpoint.generators_below import held_generators
from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note

Objects = Callable[[], Mapping[str, Any]]


class HeldGenerators:
    """Those of what `objects()` returns by name. They are looked for each time: an object may get one late."""

    def __init__(self, objects: Objects) -> None:
        self._objects = [objects]

    def also(self, objects: Objects) -> None:
        """Look through these objects, too."""
        self._objects.append(objects)

    def objects(self) -> dict[str, Any]:
        """Return what is looked through, by name; raises what who names it does."""
        return {name: item for objects in self._objects for name, item in objects().items()}

    def find(self) -> dict[str, Any]:
        """Return them by the way to them. Never raises."""
        try:
            return held_generators(self.objects())
        except Exception as error:  # noqa: BLE001 - a save is not lost over it
            self._note(error)
            return {}

    def capture(self) -> dict[str, Any]:
        """Return their states as a JSON value. Never raises."""
        from resilience_sdk.checkpoint.state import capture_generators  # imports torch

        try:
            return capture_generators(self.find())
        except Exception as error:  # noqa: BLE001 - a generator of somebody else's kind
            self._note(error)
            return {}

    def restore(self, saved: Mapping[str, Any], *, says: bool = True) -> None:
        """Set them as they were at `capture`, and say which are not here. Never raises.

        `says`: all objects are here by now.
        """
        from resilience_sdk.checkpoint.state import restore_generators

        if not saved:
            return
        found = self.find()
        try:
            restore_generators(found, saved)
        except Exception as error:  # noqa: BLE001 - a state of another kind, or of another version of a library
            self._note(error)
        for name in [name for name in saved if name not in found][: 1 if says else 0]:
            note(
                "held generator",
                f"the generator {name}",
                "the checkpoint has its state, and nothing here holds it by that way, so it begins as the program has "
                "made it",
                "make it before the resume, where it was",
            )

    @staticmethod
    def _note(error: Exception) -> None:
        say_once("held generators", f"generators that objects hold are not saved or restored: {describe(error)}")
