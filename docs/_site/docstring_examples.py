"""Shows the `Example:` of a docstring as code: it is written as plain code there, and would be read as text."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:\n((?:\1    .*\n|\n)+?)(?=\1\S|\Z)", re.MULTILINE)


def _fenced(example: re.Match[str]) -> str:
    indent, code = example[1], example[2].rstrip("\n")
    return f"{indent}Example:\n{indent}    ```python\n{code}\n{indent}    ```\n"


class DocstringExamples(griffe.Extension):
    """Puts a fence around each of them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of what was read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value + "\n").rstrip("\n")
