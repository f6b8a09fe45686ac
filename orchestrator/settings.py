"""Declaring settings: one line says a setting's name, type, range, default, help and option.

A record of settings is a frozen dataclass below Settings, whose fields are made by setting(). What
checks values, offers options, prints help, writes traces and tables of the documents reads the
declarations, and names no setting.
"""

from __future__ import annotations

import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator.errors import ConfigError, SettingError

_TOO_LARGE = 1 << 60
# A number without a unit below this is not a size that anybody means in bytes.
_LEAST_BARE = 1 << 20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", re.IGNORECASE | re.ASCII)

# Units of a value, as an option writes it.
SIZE, RATE = "size", "rate"

# The groups of options in --help, and the one that is left to --help-all.
MODEL, MEMORY, PRECISION, ANSWER = "Model", "Memory", "Precision", "Answer"
COMMON = (MODEL, MEMORY, PRECISION, ANSWER)
MORE = "More"

# Ranges without a most.
FROM_0, FROM_1 = (0, math.inf), (1, math.inf)
_LEAST = {SIZE: FROM_1, RATE: FROM_0}

_DECLARED = "moe-edge"

S = TypeVar("S", bound="Settings")


class Notation(NamedTuple):
    """How a value is written that is no number, word or size, as a list. read raises
    ConfigError."""

    read: Callable[[str], Any]
    write: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Setting:
    """What one line declares. kinds: types of a value; optional: None is one too, and means that
    nothing was asked for. within: the least and the most, both allowed. unit: SIZE, bytes that an
    option writes as 6GiB, one at least unless within says more; RATE, the same or 0. notation: how
    an option writes what has no unit and is no number or word. option: whether the command line has
    it. group: one of COMMON, in which --help has it by the first sentence of its help, or MORE,
    which --help-all alone has; without one it is among a command's own options, or below the
    policies that have it, in --help-all. answer: it is of an answer, not of how the model runs, as
    all of the group ANSWER. conversation: it is of a program that holds conversations. repeated:
    its value is a tuple of texts, and its option may be given several times. live: it may be
    changed between two tokens. recorded: it says how a policy decides, so that a trace keeps it and
    a replay may change it."""

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
        """The option that asks for it."""
        return flag_of(self.name)

    @property
    def default_text(self) -> str:
        """What stands for the default in a help text; empty where there is none to name."""
        if self.shown is not None:
            return self.shown
        if self.default is None or self.default is False or self.repeated:
            return ""
        if self.default is True:
            return "yes"
        return self.notation.write(self.default) if self.notation else str(self.default)

    def check(self, value: Any) -> None:
        """Raises SettingError for a value that the declaration does not allow."""
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
        """The value that a user writes as this text. Raises SettingError, ConfigError."""
        if self.notation is not None:
            return self.notation.read(text)
        if self.repeated:
            try:  # as a shell separates them; - for none
                texts = () if text.strip() == "-" else tuple(shlex.split(text))
            except ValueError:
                complaint = f"has a quotation mark without its other one: {text}"
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


def setting(default: Any, help: str, **said: Any) -> Any:
    """A field of a record of settings. said: fields of Setting. shown: how the help names the
    default, where that is not the value itself. default MISSING: there is none, a value has to be
    given."""
    return field(default=default, metadata={_DECLARED: {"help": help, **said}})


def again(record: type[Settings], name: str, default: Any = MISSING, **changes: Any) -> Any:
    """The field `name` of a record declared once more in another record: with another default
    where one is given, and with changes to what setting() said of it."""
    declared = record.__dataclass_fields__[name]
    said = {**declared.metadata[_DECLARED], **changes}
    chosen = declared.default if default is MISSING else default
    return field(default=chosen, metadata={_DECLARED: said})


@dataclass(frozen=True)
class Settings:
    """A record of settings. One that exists is checked: making it raises SettingError."""

    @classmethod
    @cache
    def declared(cls) -> Mapping[str, Setting]:
        """The declarations by name, in the order of the fields."""
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
        """The record with those of the given settings that are its own; None counts as not
        given."""
        known = cls.declared()
        return cls(**{k: v for k, v in given.items() if k in known and v is not None})

    @classmethod
    def changed(cls: type[S], recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> S:
        """The record of a recorded run with changes to it."""
        return cls.of({**recorded, **changes})

    @classmethod
    def without_effect(cls, asked: Mapping[str, Any]) -> str | None:
        """A sentence about a setting that can do nothing beside the others that were asked for."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """Values by name, of the settings that a trace records."""
        return {name: getattr(self, name) for name, one in self.declared().items() if one.recorded}


def _declaration(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Setting:
    said = dict(metadata[_DECLARED])
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
    """The option of a setting, as --low-tier of low_tier."""
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """Return the bytes of "6GiB", "6G" (the same), "1.5 GiB", "500MB" (a power of ten), "4096B" or
    "8388608".

    Raises ConfigError for anything else: zero, more than any machine has, and a number without a
    unit below 1 MiB, which usually means GiB.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is not a size: write it as 6GiB, 500MB or a number of bytes")
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
        raise ConfigError(f"the size '{text}' is more than any machine has")
    return size_bytes
