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
    """How an option writes a value that is not a number, a word or a size, such as a list.

    read: parses a text; raises ConfigError. write: formats a value.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting.

    kinds: Python types of its value. optional: whether None is allowed, which means that the user
    did not choose a value. within: minimum and maximum, both included. choices: allowed words.
    unit: SIZE for bytes that an option writes as 6GiB, at least 1 unless `within` says otherwise;
    RATE for the same with 0 allowed. notation: how an option writes other values. shown: how the
    help names the default, if not by its value. repeated: the value is a tuple of texts, and the
    option may be given several times.

    option: whether the command line has it. group: one of COMMON, for which --help shows the first
    sentence of `help`; or MORE, which only --help-all shows. Settings without a group are shown
    with the command's own options, or under the policies that have them.

    answer: it concerns an answer, and not how the model runs. True for the whole group ANSWER.
    conversation: it concerns programs that hold conversations. live: it may change between two
    tokens. recorded: it affects a policy's decisions, so a trace stores it and a replay may change
    it.
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
        """The option that sets it."""
        return flag_of(self.name)

    @property
    def default_text(self) -> str:
        """The default as the help shows it; empty if the help shows none."""
        if self.shown is not None:
            return self.shown
        if self.default is None or self.default is False or self.repeated:
            return ""
        if self.default is True:
            return "yes"
        return self.notation.write(self.default) if self.notation else str(self.default)

    def check(self, value: Any) -> None:
        """Raise SettingError for a value that is not allowed."""
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
            raise SettingError(self.name, f"must be texts that are not empty, not {value!r}")
        if self.choices and value not in self.choices:
            words = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise SettingError(self.name, f"must be {words}, not '{value}'")

    def parse(self, text: str) -> Any:
        """Return the value of an option's text. Raises SettingError, ConfigError."""
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
    """Return a dataclass field that declares a setting.

    default: MISSING if a value has to be given. help: a text, or a function that returns it, which
    is called when the declarations are first read. said: fields of `Setting`.
    """
    return field(default=default, metadata={_DECLARED: {"help": help, **said}})


def inherit(record: type[Settings], name: str, default: Any = MISSING, **changes: Any) -> Any:
    """Return a field that repeats the declaration `name` of another record.

    default: replaces the default, if given. changes: replace fields of `Setting`.
    """
    declared = record.__dataclass_fields__[name]
    said = {**declared.metadata[_DECLARED], **changes}
    chosen = declared.default if default is MISSING else default
    return field(default=chosen, metadata={_DECLARED: said})


@dataclass(frozen=True)
class Settings:
    """Base class of settings records. Construction checks all values and raises SettingError.

    usual: values that a policy uses for settings that are None.
    """

    usual: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @cache
    def declared(cls) -> Mapping[str, Setting]:
        """Return the declarations by name, in the order of the fields."""
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
        """Return a record with those given values that belong to it.

        Other names are ignored, and None counts as not given.
        """
        known = cls.declared()
        return cls(**{k: v for k, v in given.items() if k in known and v is not None})

    def with_usual(self: S) -> S:
        """Return the record with the usual values for settings that are None."""
        missing = {name: v for name, v in self.usual.items() if getattr(self, name) is None}
        return replace(self, **missing) if missing else self

    @classmethod
    def changed(cls: type[S], recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> S:
        """Return the record of a recorded run, with some settings changed."""
        return cls.of({**recorded, **changes})

    @classmethod
    def without_effect(cls, asked: Mapping[str, Any]) -> str | None:
        """Return a sentence about a setting that has no effect in combination with the others.

        Return None if there is no such setting.
        """
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return the values of the settings that a trace records, by name."""
        return {name: getattr(self, name) for name, one in self.declared().items() if one.recorded}


def _declaration(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Setting:
    """Return the declaration of a field. hint: its type annotation."""
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
    """Return the option of a setting: --low-tier for low_tier."""
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """Parse a size to bytes.

    Examples are "6GiB", "6G" (the same), "1.5 GiB", "500MB" (a power of ten), "4096B" and
    "8388608".

    Raises ConfigError for anything else, for 0 and for 2**60 or more. A number below 1 MiB without
    a unit is refused as well, because it usually means GiB.
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
            f"the size '{text}' has no unit: write {number}{meant}, or {number}B for so few bytes"
        )
    if size_bytes >= _TOO_LARGE:
        raise ConfigError(f"the size '{text}' is larger than the memory of any machine")
    return size_bytes
