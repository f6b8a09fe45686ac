"""Settings are strict where they come in."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.settings import parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("6GiB", 6 * 2**30),
        ("6G", 6 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500_000_000),
        (" 64 kib ", 65536),
        ("2tb", 2 * 10**12),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "6 gigs", "GiB", "-1", "1e9", "0", "0.0001KB", "١GB", "1_000"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'retention'"):
        Config.build(model="m", retension=0.5)
    with pytest.raises(ConfigError, match="known: model, low"):
        Config.build(model="m", zzz=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("retention", 1.5),
        ("retention", float("nan")),
        ("retention", "0.5"),
        ("retention", True),
        ("ram", 0),
        ("ram", 1.5),
        ("ram", "6GiB"),
        ("ctx", 0),
        ("ubatch", 0),
        ("max_tokens", 0),
        ("temp", -0.1),
        ("temp", float("inf")),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**32),
        ("threads", 0),
        ("n_ahead", 5),
        ("io_threads", 0),
        ("model", 3),
        ("policy", 3),
        ("use_extra_bufts", 1),
        ("force_managed", None),
    ],
)
def test_wrong_values(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        Config.build(**({"model": "m"} | {key: value}))


def test_changed_copy_is_checked_too() -> None:
    config = Config.build(model="m", seed=7)
    assert config.with_changes(policy="lru").policy == "lru"
    assert config.with_changes(policy="lru").seed == 7
    with pytest.raises(ConfigError):
        config.with_changes(retention=2.0)
