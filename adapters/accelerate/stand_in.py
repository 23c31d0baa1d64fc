"""Methods of ours in the place of an object's own, for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StandIn:
    """Stands in for methods of one object, as attributes of it; `restore()` ends that."""

    def __init__(self, target: Any, **methods: Callable[..., Any]) -> None:
        """Put `methods` on `target`, by name."""
        self._target = target
        self._methods = methods
        own = vars(target)
        self._before = {name: own[name] for name in methods if name in own}
        own.update(methods)

    def restore(self) -> None:
        """Give the object back what it had. May be repeated."""
        own = vars(self._target)
        for name, method in self._methods.items():
            if own.get(name) == method:  # else somebody has put another one around it, which stays
                del own[name]
                if name in self._before:
                    own[name] = self._before[name]
