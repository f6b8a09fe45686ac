"""Settings are checked when a record is built, by the ranges and choices that its fields
declare."""

from dataclasses import dataclass

import pytest
from tables import cases

from gguf_tools import process
from orchestrator import config as config_module
from orchestrator.config import Config
from orchestrator.errors import ConfigError, SettingError
from orchestrator.settings import FROM_1, Notation, Settings, inherit, parse_size, setting

SIZES = {
    "4096B": 4096,
    "8388608": 1 << 23,
    "6GiB": 6 * 2**30,
    "6G": 6 * 2**30,
    "1.5 GiB": 3 * 2**29,
    "7b": 7,
}
SIZES |= {"500MB": 500_000_000, " 64 kib ": 65536, "2tb": 2 * 10**12}


def test_sizes_with_units():
    assert {text: parse_size(text) for text in SIZES} == SIZES


@cases("text", "", "6 gigs", "GiB", "-1", "1e9", "0", "0.0001KB", "١GB", "1_000")
def test_texts_that_are_not_sizes_are_refused(text):
    with pytest.raises(ConfigError):
        parse_size(text)


@cases(
    "text, meant",
    ("5", "write 5GiB, or 5B if you mean bytes"),
    ("1.5", "write 1.5GiB"),
    ("4096", "write 4096MiB"),
)
def test_a_number_without_a_unit_is_refused_below_1_mib(text, meant):
    with pytest.raises(ConfigError, match=meant):
        parse_size(text)


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'retention'"):
        Config.build(model="m", retension=0.5)
    with pytest.raises(ConfigError, match="known: model, low"):
        Config.build(model="m", zzz=1)


WRONG = {
    "retention": (1.5, float("nan"), "0.5", True),
    "ram": (0, 1.5, "6GiB"),
    "temp": (-0.1, float("inf")),
    "top_p": (1.01,),
    "seed": (-1, 2**32),
    "n_ahead": (5,),
    **dict.fromkeys(("ctx", "ubatch", "max_tokens", "threads", "io_threads"), (0,)),
    **dict.fromkeys(("model", "policy"), (3,)),
    "use_extra_bufts": (1,),
    "force_managed": (None,),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_name_the_setting(key):
    for value in WRONG[key]:
        with pytest.raises(ConfigError, match=f"'{key}'"):
            Config.build(**({"model": "m"} | {key: value}))


def test_changed_copy_is_checked_too():
    config = Config.build(model="m", seed=7)
    assert config.with_changes(policy="lru").policy == "lru"
    assert config.with_changes(policy="lru").seed == 7
    with pytest.raises(ConfigError):
        config.with_changes(retention=2.0)


def words_of(text):
    if not text:
        raise ConfigError("no words")
    return tuple(text.split("+"))


@dataclass(frozen=True)
class Few(Settings):
    n: int = setting(2, "How many.", within=FROM_1)
    share: float = setting(0.5, "Of them.", within=(0, 1))
    how: str = setting("on", "Or off.", choices=("on", "off"))
    more: int | None = setting(None, "Beside them.", within=FROM_1)
    words: tuple[str, ...] = setting(("a", "b"), "Said.", notation=Notation(words_of, "+".join))


@dataclass(frozen=True)
class Fewer(Few):
    n: int = inherit(Few, "n", 1)
    share: float = inherit(Few, "share", option=False, within=(0, 2))
    words: tuple[str, ...] = inherit(Few, "words", ("c", "d"))


def test_a_record_is_checked_by_its_declarations():
    assert Few(more=None) == Few()
    for changes, message in (
        ({"n": 0}, "'n' must be 1 or more, not 0"),
        ({"n": True}, "'n' must be int, not True"),
        ({"share": 1.5}, "'share' must be 0 to 1, not 1.5"),
        ({"share": float("nan")}, "'share' must be 0 to 1, not nan"),
        ({"how": "maybe"}, "'how' must be on or off, not 'maybe'"),
        ({"more": 0}, "'more' must be 1 or more, not 0"),
        ({"words": ["a"]}, r"'words' must be tuple, not \['a'\]"),
    ):
        with pytest.raises(SettingError, match=message):
            Few(**changes)


def test_a_setting_may_be_declared_again_with_changes():
    before, after = Few.declared(), Fewer.declared()
    assert list(before) == list(after)
    assert (after["n"].default, after["n"].help, after["n"].within) == (1, "How many.", FROM_1)
    assert (after["share"].default, after["share"].option) == (0.5, False)
    assert (before["n"].default, before["share"].option) == (2, True)
    assert Fewer(share=1.5).n == 1
    with pytest.raises(SettingError, match="'n' must be 1 or more, not 0"):
        Fewer(n=0)


def test_a_notation_reads_a_value_and_shows_the_default():
    words = Fewer.declared()["words"]
    assert words.parse("x+y") == ("x", "y")
    assert (words.default_text, words.metavar) == ("c+d", "LIST")
    with pytest.raises(ConfigError, match="no words"):
        words.parse("")


@cases(
    "settings, n_threads, adapts",
    ({}, 2, True),
    ({"threads": 1}, 1, False),
    ({"threads": 1000}, 4, False),
    ({"seed": 0}, 2, False),
    ({"exact": True}, 2, False),
    ({"exact": True, "threads": 4}, 4, False),
)
def test_threads_are_capped_at_the_cores(settings, n_threads, adapts, monkeypatch):
    for module in (process, config_module):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(process, "default_threads", lambda: 2)
    config = Config.build(model="m.gguf", **settings)
    assert (config.n_threads, config.adapts_threads) == (n_threads, adapts)


def test_exact_refuses_more_threads_than_cores():
    with pytest.raises(
        ConfigError, match=r"--threads 1000 cannot .* --exact: this process may use"
    ):
        Config.build(model="m.gguf", exact=True, threads=1000)
