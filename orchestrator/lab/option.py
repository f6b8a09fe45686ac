"""Options of experiments: each is declared once, as a field of a record. Its check, its option on
the command line, its help and its default follow from that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from typing import Any

from orchestrator.errors import ConfigError

_KEY = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """What is said of a field beside its name and its default.

    help: "" for a field that the command line has no option for. least, most: of a number.
    choices: the texts that are allowed. parse makes the value of what was typed; it raises
    ConfigError. spelled: the option, where it is not the field's name. told: how the help
    names the default, where the value says nothing. shown: how the value of a default is written.
    """

    help: str = ""
    metavar: str = "N"
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    spelled: str = ""
    told: str = ""
    shown: Callable[[Any], str] = str

    def complaint(self, value: Any) -> str:
        """What the value has to be, where it is not; else ""."""
        if self.choices and value not in self.choices:
            return f"must be {' or '.join(self.choices)}, not '{value}'"
        if self.least is None:
            return ""
        most = math.inf if self.most is None else self.most
        if math.isfinite(value) and self.least <= value <= most:
            return ""
        if self.most is None:
            return f"must be at least {self.least}"
        return f"must be from {self.least} to {self.most}"


def option(default: Any, help: str = "", **declared: Any) -> Any:
    """A field of a record of options; declared: fields of Option."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, **declared)})


def again(record: Any, name: str, default: Any = MISSING, **changes: Any) -> Any:
    """The field `name` of a record once more, for a record made from it: with another default, or
    other words. help="" takes its option away."""
    field = record.__dataclass_fields__[name]
    declared = dataclasses.replace(field.metadata[_KEY], **changes)
    chosen = field.default if default is MISSING else default
    return dataclasses.field(default=chosen, metadata={_KEY: declared})


def declared_options(record: Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a record of options, or of its class, each with what is said of it."""
    for field in dataclasses.fields(record):
        yield field, field.metadata[_KEY]


def check_options(record: Any) -> None:
    """Raises ConfigError where a value is not what its field allows; None always is."""
    for field, declared in declared_options(record):
        value = getattr(record, field.name)
        complaint = "" if value is None else declared.complaint(value)
        if complaint:
            raise ConfigError(f"{field.name} {complaint}")


def parse_numbers(text: str, what: str = "numbers") -> tuple[int, ...]:
    """Numbers from "8,16,32"; what they are, for the error. Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of {what} such as 8,16,32") from None


def show_numbers(numbers: tuple[int, ...]) -> str:
    """ "8,16,32" of numbers."""
    return ",".join(map(str, numbers))
