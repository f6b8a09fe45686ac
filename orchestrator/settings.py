"""Declares settings: one call of `setting()` gives the name, type, range, default, help and option.

A group of settings is a frozen dataclass derived from `Settings`, with fields made by `setting()`.
Checks, command-line options, help texts, traces and the tables in the documentation are derived
from these declarations.
"""

from __future__ import annotations

import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from orchestrator.errors import ConfigError, SettingError

_TOO_LARGE = 1 << 60
# A smaller number without a unit is refused as a size: the user most likely meant GiB or MiB.
_LEAST_BARE = 1 << 20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", re.IGNORECASE | re.ASCII)

# Units of values, which options write with a suffix.
SIZE, RATE = "size", "rate"

# The groups that --help shows. Only --help-all shows the group MORE.
MODEL, MEMORY, PRECISION, ANSWER = "Model", "Memory", "Precision", "Answer"
COMMON = (MODEL, MEMORY, PRECISION, ANSWER)
MORE = "More"

# Ranges without an upper limit.
FROM_0, FROM_1 = (0, math.inf), (1, math.inf)
_LEAST = {SIZE: FROM_1, RATE: FROM_0}

_DECLARED = "moe-edge"

S = TypeVar("S", bound="Settings")


class Notation(NamedTuple):
    """A text format for option values that are not a number, a word or a size, such as lists.

    - read: parses a text to a value. Raises ConfigError.
    - write: formats a value as text.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting: its type, range, default, help text and option.

    The value:

    - kinds: its Python types.
    - optional: whether it may be None, which means that the user chose no value.
    - within: the smallest and the largest allowed number.
    - choices: the allowed words.
    - unit: SIZE for a number of bytes, or RATE for bytes or bytes per second. Users may write both
      as 6GiB. With SIZE, 0 is not allowed. With RATE, 0 is allowed.
    - notation: the text format of a value that is not a number, a word or a size, such as a list.
    - repeated: whether the option may be given several times. The value is then a tuple of texts.

    The option and its help:

    - option: whether the command line has an option for the setting.
    - metavar, help: the placeholder and the description in the help.
    - shown: the text for the default in the help, if it is not the value itself.
    - group: the heading in the help. Only --help-all shows the group MORE. A setting without a
      group is shown with the command's own options or with its policies.

    The use of the setting:

    - answer: whether it concerns an answer instead of the model. True for the group ANSWER.
    - conversation: whether it concerns programs that hold conversations.
    - live: whether the value may change between two tokens.
    - recorded: whether the value affects a policy's decisions. A trace stores it, and a replay may
      change it.
    """

    name: str
    kinds: tuple[type, ...]
    optional: bool
    default: Any
    help: str
    metavar: str = ""
    within: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    unit: str | None = None
    notation: Notation | None = None
    shown: str | None = None
    option: bool = True
    group: str = ""
    answer: bool = False
    conversation: bool = False
    repeated: bool = False
    live: bool = False
    recorded: bool = True

    @property
    def flag(self) -> str:
        """The command-line option that sets this setting, such as --low-tier."""
        return flag_of(self.name)

    @property
    def default_text(self) -> str:
        """The text for the default in the help. Empty if the help should show none."""
        if self.shown is not None:
            return self.shown
        if self.default is None or self.default is False or self.repeated:
            return ""
        if self.default is True:
            return "yes"
        return self.notation.write(self.default) if self.notation else str(self.default)

    def check(self, value: Any) -> None:
        """Raise SettingError if a value has the wrong type or is out of range."""
        if value is None and self.optional:
            return
        wrong_bool = isinstance(value, bool) and bool not in self.kinds
        if not isinstance(value, self.kinds) or wrong_bool:
            wanted = " or ".join(kind.__name__ for kind in self.kinds)
            raise SettingError(self.name, f"must be {wanted}, not {value!r}")
        if self.within is not None and isinstance(value, (int, float)):
            low, high = self.within
            if not (low <= value <= high and math.isfinite(value)):
                upper = f" to {high}" if high != math.inf else " or more"
                raise SettingError(self.name, f"must be {low}{upper}, not {value}")
        if self.repeated and not all(isinstance(each, str) and each for each in value):
            raise SettingError(self.name, f"must be a list of non-empty texts, not {value!r}")
        if self.choices and value not in self.choices:
            words = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise SettingError(self.name, f"must be {words}, not '{value}'")

    def parse(self, text: str) -> Any:
        """Return the value that a text on the command line means for this setting.

        Raises SettingError or ConfigError if the text is not valid.
        """
        if self.notation is not None:
            return self.notation.read(text)
        if self.repeated:
            try:  # split like in a shell; - means an empty tuple
                texts = () if text.strip() == "-" else tuple(shlex.split(text))
            except ValueError:
                complaint = f"has an unmatched quotation mark: {text}"
                raise SettingError(self.name, complaint) from None
            self.check(texts)
            return texts
        if self.unit is not None:
            return 0 if self.unit == RATE and text.strip() == "0" else parse_size(text)
        kind = self.kinds[0]
        if kind is bool:
            known = {"true": True, "false": False, "1": True, "0": False}
            if text.lower() not in known:
                raise SettingError(self.name, f"must be true or false, not '{text}'")
            return known[text.lower()]
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            if self.within is not None:
                what += " from {:g} to {:g}".format(*self.within)
            raise SettingError(self.name, f"must be {what}, not '{text}'") from None
        self.check(value)
        return value


def setting(default: Any, help: str | Callable[[], str], **said: Any) -> Any:
    """Return a dataclass field that declares a setting with this default and help text.

    - default: MISSING if users must give a value.
    - help: a text, or a function that returns it. The function is called when the declarations are
      first read.
    - said: further fields of `Setting`, such as choices or within.
    """
    return field(default=default, metadata={_DECLARED: {"help": help, **said}})


def inherit(record: type[Settings], name: str, default: Any = MISSING, **changes: Any) -> Any:
    """Return a dataclass field with a copy of the setting `name` declared in another record.

    default: replaces the default of the declaration, if given. changes: values that replace other
    fields of the declaration.
    """
    declared = record.__dataclass_fields__[name]
    said = {**declared.metadata[_DECLARED], **changes}
    chosen = declared.default if default is MISSING else default
    return field(default=chosen, metadata={_DECLARED: said})


@dataclass(frozen=True)
class Settings:
    """Base class of groups of settings, which are frozen dataclasses with fields made by setting().

    Making an object checks all values, and raises SettingError for one that is not allowed.

    usual: values that a policy uses for settings that are None.
    """

    usual: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @cache
    def declared(cls) -> Mapping[str, Setting]:
        """Return the declarations of the settings of this class by name, in order of the fields."""
        hints = typing.get_type_hints(cls)
        return {
            each.name: _declaration(each.name, hints[each.name], each.default, each.metadata)
            for each in fields(cls)
            if _DECLARED in each.metadata
        }

    def __post_init__(self) -> None:
        for name, declared in self.declared().items():
            declared.check(getattr(self, name))

    @classmethod
    def of(cls: type[S], given: Mapping[str, Any]) -> S:
        """Make an object of this class from the given values, by setting name.

        Names that this class does not declare are ignored. A value of None counts as not given.
        """
        known = cls.declared()
        return cls(**{k: v for k, v in given.items() if k in known and v is not None})

    def with_usual(self: S) -> S:
        """Return a copy in which settings that are None have their values from the dict `usual`.

        `usual` is an attribute of the class. It maps names of settings to the values that a policy
        uses if the user chose no value.
        """
        missing = {name: v for name, v in self.usual.items() if getattr(self, name) is None}
        return replace(self, **missing) if missing else self

    @classmethod
    def changed(cls: type[S], recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> S:
        """Return the settings of a recorded run, with some of them changed."""
        return cls.of({**recorded, **changes})

    @classmethod
    def without_effect(cls, asked: Mapping[str, Any]) -> str | None:
        """Return a sentence that names a given setting that has no effect with the other settings.

        Return None if each given setting has an effect. asked: the given settings by name.
        """
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return the values of the settings that affect a policy's decisions, by setting name.

        Settings that are declared with `recorded=False` are left out. A trace stores the result.
        """
        return {name: getattr(self, name) for name, one in self.declared().items() if one.recorded}


def _declaration(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Setting:
    """Return the declaration of the setting that a dataclass field makes.

    hint: the type annotation of the field. metadata: the metadata that setting() stored in the
    field.
    """
    said = dict(metadata[_DECLARED])
    if callable(said["help"]):
        said["help"] = said["help"]()
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    optional = type(None) in kinds
    kinds = tuple(typing.get_origin(kind) or kind for kind in kinds if kind is not type(None))
    if float in kinds:
        kinds = (float, int)
    unit = said.get("unit", "")
    said = {"within": _LEAST.get(unit), "answer": said.get("group") == ANSWER, **said}
    if not said.get("metavar"):
        usual = {int: "N", float: "X", Path: "FILE", tuple: "LIST"}.get(kinds[0], "NAME")
        said["metavar"] = "SIZE" if unit else usual
    return Setting(name, kinds, optional, None if default is MISSING else default, **said)


def flag_of(name: str) -> str:
    """Return the command-line option of a setting, such as --low-tier for low_tier."""
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as "6GiB" or "500MB" means.

    "6G" and "6GiB" are powers of two. "500MB" is a power of ten. "4096B" and "8388608" are bytes.

    Raises ConfigError for other texts, for 0, and for 2**60 bytes or more. Also raises ConfigError
    for a number below 1 MiB without a unit, because users usually mean GiB then.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is not a size: write 6GiB, 500MB or a number of bytes")
    number, letter, unit = (each.lower() for each in match.groups(""))
    factor = (1000 if unit == "b" else 1024) ** (" kmgt".index(letter) if letter else 0)
    size_bytes = int(min(float(number) * factor, float(_TOO_LARGE)))
    if size_bytes <= 0:
        raise ConfigError(f"the size '{text}' must be more than zero bytes")
    if text.strip() == number and size_bytes < _LEAST_BARE:
        meant = "GiB" if size_bytes < 1024 else "MiB"
        raise ConfigError(
            f"the size '{text}' has no unit: write {number}{meant}, or {number}B if you mean bytes"
        )
    if size_bytes >= _TOO_LARGE:
        raise ConfigError(f"the size '{text}' is larger than the memory of any machine")
    return size_bytes
