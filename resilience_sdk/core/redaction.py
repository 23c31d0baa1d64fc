"""Redaction: secrets are taken out of everything that is written down, shown or sent.

What tells a secret is the name that stands before it (`token=...`, `Authorization: ...`, a field of a record), the
place in a URL, the shape of a well-known kind of key, or that it is the value of an environment variable whose name
says so. Each process knows its own environment only: a rank takes out what its script has set before it tells anybody.
All patterns begin with a literal or at the beginning of a word and have bounds, so that a text takes time in
proportion to its length, whatever it holds.
"""

from __future__ import annotations

import functools
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from resilience_sdk.core import environ

REDACTED = "[redacted]"
LEAST_LENGTH = 8
"""Characters of the shortest value of an environment variable that is looked for in texts: `true`, `1` or `main` as the
value of some `..._KEY` would take words out of every sentence."""

_NAME = re.compile(r"KEY|TOKEN|SECRET|(?<!BY)PASS(?!_?(ENV|THROUGH))|CREDENTIAL|JWT|WEBHOOK.URL", re.IGNORECASE)
_TOKENIZER = re.compile(r"tokeniz(er|ed|ing|ation)?", re.IGNORECASE)
_COUNTED_NAME = re.compile(r"tokens|passes", re.IGNORECASE)
# Variables that say where a secret is.
_PLACE = re.compile(r"(_FILE|_PATH|_DIR|_SOCK)$", re.IGNORECASE)
# A text without any of these holds no secret that a name or a shape could tell.
_HINT = re.compile(
    r"key|token|secret|pass|pwd|credential|sig|auth|cookie|bearer|code=|://|-----BEGIN|hf_|gh[pousr]_|github_pat|glpat|sk-|"
    r"xox|AKIA|ASIA|eyJ",
    re.IGNORECASE,
)
# In quotes, with escapes; without; or cut off behind the first quote.
_WORD = r"""(?:\[redacted\]|"(?:[^"\\\r\n]|\\.){0,400}"|'(?:[^'\\\r\n]|\\.){0,400}'|["']?[^\s"',;&)\]}]+)"""


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    """Return what to replace, but for its `head`; compiled when first needed, as most processes see no such text."""
    sources = (
        r"(?-i:-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z))",
        r"(?P<head>://[^/\s:@]{0,200}:)[^@/\s]{1,800}(?=@)",
        r"(?P<head>://)[^/\s:@]{16,800}(?=@)",
        r"(?P<head>[?&](?:[\w.-]{0,40}(?:key|token|secret|sig|signature|password|passwd|pwd|pass|credential|auth)|code)=)"
        r"[^&\s\"'#<>]+",
        r"(?P<head>(?<![\w-])(?:proxy-)?authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[a-z][\w-]{0,30}\s{1,3})?)"
        r"[^\s\"',;]+",
        r"(?P<head>(?<![\w-])(?:set-)?cookie[\"']?\s{0,3}[:=]\s{0,3}[\"']?)(?=[^\r\n\"'=]{1,80}=)[^\r\n\"']+",
        r"(?P<head>\bbearer\s{1,3})[\w.~+/=-]{8,}",
        r"(?P<head>\bapi[ -]key\b[^\w\r\n]{1,4}(?:is )?)[\w.~+/=-]{16,}",
        r"(?-i:(?<![\w-])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
        r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}))",
    )
    return tuple(re.compile(source, re.IGNORECASE) for source in sources)


def _behind_head(found: re.Match[str]) -> str:
    return (found.groupdict().get("head") or "") + REDACTED


@functools.cache
def _option() -> re.Pattern[str]:
    return re.compile(
        r"(?P<name>(?<![\w-])--[\w-]{0,40}?(?:secret|token|passw(?:or)?d|passphrase|credential|key))(?![\w-])"
        r"(?P<quote>)(?P<between>[ \t]{1,3})(?P<value>\[redacted\]|(?![-\[])[^\s\"',;)\]}]+)",
        re.IGNORECASE,
    )


@functools.cache
def _assignment() -> re.Pattern[str]:
    return re.compile(
        r"(?P<name>(?<![\w.-])[\w.-]{0,60}?(?:secret|token|passw(?:or)?d|passphrase|pwd|credential|key|pass)[\w.-]{0,40})"
        rf"(?P<quote>[\"']?)(?P<between>\s{{0,2}}(?:=>|=|:)\s{{0,2}})(?P<value>{_WORD})",
        re.IGNORECASE,
    )


_ALWAYS = re.compile(
    r"secret|passw|passphrase|pwd|credential|(api|access|private|account|signing|auth|encryption)[_.-]?key", re.I
)
# Tokens that are symbols of a vocabulary, and counts of them.
_SYMBOL = re.compile(
    r"(^|[_.-])(pad|bos|eos|unk|sep|cls|mask|start|stop|end|image|audio|special|next|last|first|new|num|max|min|per|n|unexpected)"
    r"[_.-]?token|token[_.-]?(ids?|types?|counts?|len|ind|embed|mask|dim|size|num|level|budget|limit|classif|index)",
    re.IGNORECASE,
)


def redact(value: Any, name: str = "") -> Any:
    """Return a JSON value without secrets, in nested mappings, lists and texts; `name`: of the field that holds it."""
    return _redact(value, name, secret_values(environ.environment()))


def redact_text(text: str) -> str:
    """Return a text, of any length and number of lines, without secrets."""
    return _without(text, secret_values(environ.environment()))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that an environment holds under names of secrets, as far as they are long enough."""
    return tuple(value for name, value in env.items() if len(value) >= LEAST_LENGTH and _names_a_secret(name))


def redact_argv(words: Iterable[str]) -> list[str]:
    """Return a command line without its secrets: `--hf-token=x`, `--api-key x` and `api_key=x` lose their values.

    What tells is the option's name. Tokenizers are no secrets, and neither are counts (`--max-tokens 4096`).
    """
    shown: list[str] = []
    name = ""  # of an option whose value is the next word
    for word in words:
        if name and not word.startswith("-") and _is_secret(name, word):
            shown.append(REDACTED)
            name = ""
            continue
        head, equals, value = word.partition("=")
        if equals and "/" not in head and _is_secret(head, value):
            shown.append(f"{head}={REDACTED}")
        else:
            shown.append(redact_text(word))
        name = word if word.startswith("-") and not equals else ""
    return shown


def _redact(value: Any, name: str, known: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        # A key may be a name that the user gives: of a section, a metric, a part of the state.
        return {_without(str(key), known): _redact(item, str(key), known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, name, known) for item in value]
    if name and _is_secret_field(name, value):
        return REDACTED
    return _without(value, known) if isinstance(value, str) else value


def _is_secret_field(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    if isinstance(value, (int, float)):
        return _ALWAYS.search(name) is not None  # `tokens_per_s` is a rate
    return _NAME.search(_TOKENIZER.sub("", name)) is not None


def _without(text: str, known: tuple[str, ...]) -> str:
    if known and (pattern := _any_of(known)) is not None:
        text = pattern.sub(REDACTED, text)
    if _HINT.search(text) is None:
        return text
    for pattern in _patterns():
        text = pattern.sub(_behind_head, text)
    text = _assignment().sub(_without_value, text)
    return _option().sub(_without_value, text) if "--" in text else text


def _without_value(found: re.Match[str]) -> str:
    """Return an assignment without its value, or as it is where its name or its value tell that it is no secret."""
    name, value = found["name"], found["value"].strip("\"'")
    if not _tells(_TOKENIZER.sub("", name), value, is_quoted=bool(found["quote"]), is_equal="=" in found["between"]):
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{name}{found['quote']}{found['between']}{quote}{REDACTED}{quote}"


def _tells(name: str, value: str, *, is_quoted: bool, is_equal: bool) -> bool:
    if not value or value == REDACTED:
        return False
    if _ALWAYS.search(name):
        return True
    if "token" in name.lower():
        is_count = value.replace(",", "").replace(".", "").isdigit() and len(value) < 12
        is_word = not is_equal and not is_quoted and (value.isalpha() or len(value) < LEAST_LENGTH)
        return not (is_count or is_word or value in ("None", "True", "False", "null") or _SYMBOL.search(name))
    # `key` and `pass` mean many things; in capitals, as variables are named, they mean secrets.
    return is_equal and name.isupper() and _names_a_secret(name)


@functools.lru_cache(maxsize=8)
def _any_of(values: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern for any of these values, as they are or as a representation of them has it."""
    forms = {
        form
        for value in values
        for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""))
    }
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))


def _names_a_secret(name: str) -> bool:
    return bool(_NAME.search(_TOKENIZER.sub("", name))) and not _PLACE.search(name)


def _is_secret(name: str, value: str) -> bool:
    counted = _COUNTED_NAME.sub("", name) if value.isdigit() else name
    return bool(_NAME.search(_TOKENIZER.sub("", counted)))
