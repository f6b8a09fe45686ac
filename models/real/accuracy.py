"""Accuracy on two tasks: `python -m models.real.accuracy FILE.. --dense F16.gguf --data DIR`.

The tasks are two parts of BLiMP, which lm_eval has as tasks of the same names. An item is a good
and a bad sentence, and is solved if the good one has the greater total probability. Chance is 50 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gguf_tools.columns import aligned
from gguf_tools.process import compute_threads
from models.real.bootstrap import Values, interval
from models.real.command import reporting_errors
from models.real.judge import compare
from orchestrator.errors import ConfigError
from orchestrator.lab.observe import observe

ARCHIVE = "eval/blimp/BLiMP.zip"
TASKS = ("anaphor_number_agreement", "regular_plural_subject_verb_agreement_1")
# lm_eval reads a sentence after this token.
_START = "<|endoftext|>"


def read_pairs(data: Path, task: str, items: int) -> list[tuple[str, str]]:
    """Return the first `items` pairs of a good and a bad sentence of a task.

    Raises ConfigError if the archive or the task is missing.
    """
    path = data / ARCHIVE
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{task}.jsonl")]
            names = [name for name in names if not name.startswith("__MACOSX")]
            lines = archive.read(names[0]).decode().splitlines()[:items]
    except (OSError, zipfile.BadZipFile, IndexError) as error:
        raise ConfigError(f"{path} has no task {task}: --data names the collection") from error
    records = [json.loads(line) for line in lines]
    return [(each["sentence_good"], each["sentence_bad"]) for each in records]


def solved(nll: Values, windows: Sequence[Sequence[int]]) -> Values:
    """Return 1 for each solved item, else 0. `nll` has the scored tokens of all windows in order.

    The windows of an item follow each other, the good sentence first.
    """
    ends = np.cumsum([len(window) - 1 for window in windows])[:-1]
    sums = np.array([part.sum() for part in np.split(nll, ends)])
    found: Values = (sums[0::2] < sums[1::2]).astype(np.float64)
    return found


def _shown(values: Values) -> str:
    """Return a mean in percent with its 95 % interval over items."""
    mean, low, high = (100 * each for each in interval(values, np.arange(len(values))))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.accuracy", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="models to compare with the dense one")
    parser.add_argument("--dense", type=Path, required=True, help="the dense model in F16")
    parser.add_argument("--data", type=Path, required=True, help="folder of the text collection")
    parser.add_argument("--items", type=int, default=200, help="items of each task")
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")
    args = parser.parse_args(argv)
    threads = compute_threads(args.threads)
    for task in TASKS:
        pairs = read_pairs(args.data, task, args.items)
        with observe(args.dense, 64, threads, lambda node: False, lambda node: None) as reader:
            windows = [
                reader.model.tokenize(_START + each, add_special=False, parse_special=True)
                for pair in pairs
                for each in pair
            ]
        base, scores = compare(args.dense, args.models, windows, threads)
        dense = solved(base, windows)
        rows = [["model", "solved, % (95 %)", "difference in points (95 %)"]]
        rows.append(["dense", _shown(dense), ""])
        for path, score in zip(args.models, scores, strict=True):
            mine = solved(score.nll, windows)
            rows.append([path.name, _shown(mine), _shown(mine - dense)])
        head = f"blimp_{task}: {len(pairs)} items, chance 50 %"
        print("\n".join([head, *aligned(rows)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
