"""Accuracy on pairs of sentences (models/real/accuracy.py)."""

import json
import zipfile

import numpy as np
import pytest

from models.real.accuracy import ARCHIVE, read_pairs, solved
from orchestrator.errors import ConfigError


def test_the_sentence_of_the_smaller_sum_wins():
    windows = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]
    nll = np.array([1.0, 1.0, 2.0, 1.0, 5.0, 1.0, 1.0])
    assert solved(nll, windows).tolist() == [1.0, 0.0]


def test_pairs_are_read_from_the_archive(tmp_path):
    path = tmp_path / ARCHIVE
    path.parent.mkdir(parents=True)
    lines = [json.dumps({"sentence_good": f"g{n}", "sentence_bad": f"b{n}"}) for n in range(3)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/task.jsonl", "\n".join(lines))
    assert read_pairs(tmp_path, "task", 2) == [("g0", "b0"), ("g1", "b1")]
    with pytest.raises(ConfigError, match="has no task other"):
        read_pairs(tmp_path, "other", 2)
    with pytest.raises(ConfigError, match="has no task task"):
        read_pairs(tmp_path / "none", "task", 2)
