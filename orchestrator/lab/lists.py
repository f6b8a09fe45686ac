"""Lists, as options of experiments write them."""

from __future__ import annotations

from functools import partial

from orchestrator.errors import ConfigError
from orchestrator.settings import Notation


def numbers(what: str = "numbers") -> Notation:
    """Whole numbers, written as 8,16,32. what: the name of such numbers, for the error."""
    return Notation(partial(parse_numbers, what=what), show_numbers)


def parse_numbers(text: str, what: str = "numbers") -> tuple[int, ...]:
    """Numbers from "8,16,32"; what they are, for the error. Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of {what} such as 8,16,32") from None


def show_numbers(values: tuple[int, ...]) -> str:
    """ "8,16,32" of numbers."""
    return ",".join(map(str, values))


def parse_percentages(text: str) -> tuple[float, ...]:
    """Shares from percentages, "60,80" -> (0.6, 0.8). Raises ConfigError."""
    try:
        return tuple(float(part.strip().rstrip("%")) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of percentages such as 60,80") from None


def show_percentages(shares: tuple[float, ...]) -> str:
    """ "60,80" of shares."""
    return ",".join(f"{100 * share:.0f}" for share in shares)


PERCENTAGES = Notation(parse_percentages, show_percentages)


def parse_words(text: str) -> tuple[str, ...]:
    """("lru", "upstream mmap") from "lru, upstream mmap"."""
    return tuple(word for part in text.split(",") if (word := part.strip()))


WORDS = Notation(parse_words, ",".join)
