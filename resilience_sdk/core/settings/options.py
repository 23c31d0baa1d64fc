"""The settings as command-line options, generated from the fields, and the short `--help` of two screens.

Options of `resilience run` and the like: one `--<field-with-dashes>` per field (with underscores too, as
torchrun has it), `--config`, and the options that NVIDIA's launcher has for the same things.

`--help-all` prints what argparse makes of them all. The texts are those of the full help, each cut to its first
sentence and its default, so that no option is described in two places.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.console import say_once
from resilience_sdk.core.settings import nvrx
from resilience_sdk.core.settings.fields import FIELDS, Settings, read_value, shown_default
from resilience_sdk.core.settings.load import load_settings, read_file
from resilience_sdk.core.settings.parse import SWITCH_WORDS

_SETTING = "setting:"
_NVRX = "nvrx:"
_SPELT = "spelt nvrx"


def add_setting_options(parser: argparse.ArgumentParser) -> None:
    """Add an option per settings field, `--config`, and (accepted, not advertised) NVIDIA's launcher's.

    An option of the same name that `parser` already has is replaced: our fields decide. Their destinations
    are private; read them with `settings_arguments` or `settings_from_options`.
    """
    group = parser.add_argument_group("settings", "each is also RESILIENCE_<NAME> and a key of --config")
    handler, group.conflict_handler = group.conflict_handler, "resolve"
    group.add_argument(
        "--config",
        metavar="FILE",
        default=None,
        dest=f"{_SETTING}config",
        help="YAML or TOML file with settings",
    )
    for name, field in FIELDS.items():
        _add_field(group, name, field)
    group.add_argument(
        *nvrx.FILE_OPTIONS,
        dest=f"{_NVRX}file",
        default=None,
        metavar="FILE",
        help=f"file with a `{nvrx.SECTION}:` section of NVIDIA's extension",
    )
    for name in (*nvrx.KEYS, *nvrx.OPTIONS):
        group.add_argument(
            *nvrx.spellings(name),
            dest=f"{_NVRX}{name}",
            default=None,
            nargs=0 if name in nvrx.SWITCHES else None,
            action=_StoreSpelt,
            help=argparse.SUPPRESS,
        )
    group.conflict_handler = handler


def _add_field(group: argparse._ArgumentGroup, name: str, field: attrs.Attribute[Any]) -> None:
    dashed = name.replace("_", "-")
    names = list(dict.fromkeys((f"--{dashed}", f"--{name}")))
    text = f"{field.metadata['doc']} Default: {shown_default(field)}.".replace("%", "%%").replace("`", "")
    dest = f"{_SETTING}{name}"
    if isinstance(field.default, bool):
        add_switch(group, names, dest=dest, help_text=text)
    else:
        group.add_argument(*names, dest=dest, default=None, metavar=field.metadata["metavar"] or None, help=text)


class _StoreSpelt(argparse.Action):
    """Stores the value of an option of NVIDIA's launcher, and how it was spelt; that of a switch is True."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        spelt = {**getattr(namespace, _SPELT, {}), self.dest[len(_NVRX) :]: option_string}
        setattr(namespace, _SPELT, spelt)


def plain_switches(words: Sequence[str], takes_value: Callable[[str], bool], *, to_the_end: bool = False) -> list[str]:
    """Return the words of a command line with its switches as argparse wants them: `--name` or `--no-name`.

    `--name=true` and `--name true` become `--name`, with `false` `--no-name`; a word that is no truth value is the
    script, or whatever comes next. What follows the first word that is no option is the script's own, unless
    `to_the_end`; `takes_value(option)` tells of other options whether the next word is theirs.

    Raises:
        ConfigError: What stands behind `=` is no truth value.
    """
    plain: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        spelt, equals, value = word.partition("=")
        if word == "--" or not (word.startswith("-") or to_the_end):
            break
        at += 1
        following = words[at] if at < len(words) and not equals else None
        name = spelt.removeprefix("--").replace("-", "_")
        if not (spelt.startswith("--") and name in FIELDS and isinstance(FIELDS[name].default, bool)):
            plain.append(word)
            if following is not None and word.startswith("-") and takes_value(spelt):
                plain.append(following)
                at += 1
            continue
        if following is not None and following.lower() in SWITCH_WORDS:
            equals, value, at = "=", following, at + 1
        is_on = not equals or read_value(name, value, source=spelt)
        plain.append(spelt if is_on else f"--no-{name.replace('_', '-')}")
    return [*plain, *words[at:]]


def add_switch(parser: argparse._ActionsContainer, names: Sequence[str], *, dest: str, help_text: str) -> None:
    """Add an option that is on or off, with its `--no-`; `plain_switches` has to read the words before."""
    parser.add_argument(*names, dest=dest, default=None, action="store_true", help=help_text)
    no = f"--no-{names[0].removeprefix('--')}"
    parser.add_argument(no, dest=dest, default=None, action="store_false", help=argparse.SUPPRESS)


def settings_arguments(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given as options, ours over those of NVIDIA's launcher.

    What became of the latter is said. Values are unread text; `load_settings` reads them.

    Raises:
        ConfigError: An option of NVIDIA's launcher has a bad value.
    """
    theirs = nvrx_options(namespace, without=nvrx.OPTIONS_TAKEN)
    translation = nvrx.translate_options(theirs, getattr(namespace, _SPELT, {}))
    if translation.problems:
        raise translation.problems[0]
    nvrx.say_notes(translation.notes, "command line")
    ours = {
        name: value
        for dest, value in vars(namespace).items()
        if dest.startswith(_SETTING) and value is not None and (name := dest[len(_SETTING) :]) in FIELDS
    }
    return {**translation.values, **ours}


def nvrx_options(namespace: argparse.Namespace, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return what was given of the options of NVIDIA's launcher, by the names of `nvrx.KEYS` and `nvrx.OPTIONS`."""
    given = {dest[len(_NVRX) :]: value for dest, value in vars(namespace).items() if dest.startswith(_NVRX)}
    return {name: value for name, value in given.items() if value is not None and name not in ("file", *without)}


def nvrx_file(namespace: argparse.Namespace) -> str | None:
    """Return the file that is named with an option of NVIDIA's launcher, or None.

    None, too, where it has no section, and another option of that launcher says that this is no error. Raises
    ConfigError for a file that cannot be read then.
    """
    value = getattr(namespace, f"{_NVRX}file", None)
    if value is None:
        return None
    file = str(value)
    given = nvrx_options(namespace)
    if any(name in given for name in nvrx.SWITCHES) and nvrx.find_section(read_file(Path(file)), file) is None:
        say_once(f"nvrx:{file}", f"{file} has no `{nvrx.SECTION}:` section, and is passed over")
        return None
    return file


def config_option(namespace: argparse.Namespace) -> str | None:
    """Return the file given with `--config`, or None."""
    value = getattr(namespace, f"{_SETTING}config", None)
    return None if value is None else str(value)


def settings_from_options(namespace: argparse.Namespace, env: Mapping[str, str] | None = None) -> Settings:
    """Return the effective settings of a command: its options, then the environment and files; strict.

    Raises:
        ConfigError: Anything in them is unknown or bad.
    """
    return load_settings(
        arguments=settings_arguments(namespace),
        config_file=config_option(namespace),
        nvrx_file=nvrx_file(namespace),
        env=env,
        strict_env=True,
    )


MORE_OF_SETTINGS = "Settings are also RESILIENCE_<NAME>, and keys of the file of --config."

_DEFAULT = re.compile(r"Default: .*$", re.DOTALL)
_SENTENCE = re.compile(r"; |\.\s+(?=[A-Z\[]|$)|\s\((?=e\.g\.)")


def add_short_help(
    parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]], *, usage: str, more: str
) -> None:
    """Make `--help` print the options of `groups` only (title: names), and `--help-all` all of them.

    Args:
        parser: Has all of its options already; a name that it lacks is passed over, because torchrun's options differ
            between versions of torch.
        groups: The options to show, by title, in this order.
        usage: What stands behind the command's name in the first line.
        more: The last line: where the rest is described.
    """
    group = parser.add_argument_group("help")
    handler, group.conflict_handler = group.conflict_handler, "resolve"
    group.add_argument(
        *("-h", "--help"), action=_Print, text=lambda: _page(parser, groups, usage, more), help="show the usual options"
    )
    group.conflict_handler = handler
    group.add_argument("--help-all", action=_Print, text=parser.format_help, help="show every option")


class _Print(argparse.Action):
    """Prints a text and leaves, as argparse's own help does."""

    def __init__(self, option_strings: Sequence[str], dest: str, text: Any, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(self._text(), sys.stdout)
        parser.exit()


def _page(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]], usage: str, more: str) -> str:
    by_name = {name: action for action in parser._actions for name in action.option_strings}
    formatter = parser._get_formatter()
    formatter.add_usage(usage, [], [], f"usage: {parser.prog} ")
    formatter.add_text(parser.description)
    for title, names in groups.items():
        formatter.start_section(title)
        formatter.add_arguments([_in_short(by_name[name]) for name in names if name in by_name])
        formatter.end_section()
    formatter.add_text(more)
    return formatter.format_help()


def _in_short(action: argparse.Action) -> argparse.Action:
    """Return a copy that has one spelling of each length, and the first sentence of its help."""
    short = copy.copy(action)
    dashed = [name for name in action.option_strings if not name.startswith("--")]
    short.option_strings = [*dashed, *[name for name in action.option_strings if name.startswith("--")][:1]]
    short.help = first_sentence(action.help or "")
    return short


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, or what of it is a statement alone, and the default it names."""
    default = _DEFAULT.search(text)
    told = (text[: default.start()] if default else text).strip()
    end = _SENTENCE.search(f"{told} ")
    told = told[: end.start()] if end else told
    return f"{told}. {default[0]}" if default else told
