"""The options of the installed torchrun, read from its source: to load torch for them would take seconds.

Good for the help and for what is unknown; values are read by torchrun's own parser.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
from pathlib import Path
from typing import Any

_FUNCTION = "get_args_parser"
_SWITCHES = ("check_env", "store_true", "store_false")


def read_parser() -> argparse.ArgumentParser | None:
    """Return a parser with the names and the help of torchrun's options; None where its source says too little."""
    try:
        spec = importlib.util.find_spec("torch")  # a top-level package is found without being loaded
        if spec is None or spec.origin is None:
            return None
        return parser_in(Path(spec.origin).with_name("distributed").joinpath("run.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, ImportError):
        return None


def parser_in(source: str) -> argparse.ArgumentParser | None:
    """Return the parser that `get_args_parser` in a source text makes, None if it makes it other than step by step."""
    try:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        body = next(node for node in functions if node.name == _FUNCTION)
        parser = argparse.ArgumentParser()
        added = [_add(parser, call) for call in ast.walk(body) if isinstance(call, ast.Call) and _adds(call)]
    except (SyntaxError, StopIteration, ValueError, TypeError, argparse.ArgumentError):
        return None
    # It is made, added to, and returned: any other use might add options that are not seen here.
    uses = sum(isinstance(node, ast.Name) and node.id == "parser" for node in ast.walk(body))
    return parser if added and uses == len(added) + 2 else None


def _adds(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "add_argument"
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "parser"
    )


def _add(parser: argparse.ArgumentParser, call: ast.Call) -> argparse.Action:
    """Add one option; raises ValueError where its names, or whether a value follows, are not plain to see."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    plain: dict[str, Any] = {}
    for name in ("help", "choices", "metavar", "dest"):
        try:
            plain[name] = ast.literal_eval(given[name])
        except (KeyError, ValueError):
            continue
    action = _word(given.get("action"), "env")
    if action in _SWITCHES:
        plain["action"] = "store_true"
    elif action not in ("env", "store"):
        raise ValueError(action)
    if "nargs" in given:
        plain["nargs"] = argparse.REMAINDER if _word(given["nargs"], "") == "REMAINDER" else None
        if plain["nargs"] is None:
            raise ValueError("nargs")
    return parser.add_argument(*map(ast.literal_eval, call.args), **plain)


def _word(node: ast.expr | None, default: str) -> str:
    if node is None:
        return default
    return node.id if isinstance(node, ast.Name) else str(ast.literal_eval(node))
