"""Fixtures for tests of quality: a random model in three precisions, and texts."""

import json

import pytest

TIERS = ("q8_0", "q4_k", "q2_k")
TEXT = "The fox sat by the river and looked at the stars. It was late, and nobody came. " * 3


@pytest.fixture(scope="session")
def model(library, tiny_model):
    return tiny_model("qwen3moe", *TIERS, seed=1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def choices(tmp_path):
    path = tmp_path / "choices.jsonl"
    records = [
        {"question": f"Question {i}: which one?", "choices": ["river", "the stars", "a fox"]}
        | {"answer": i % 3}
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
