"""Accuracy on two tasks: `python -m models.real.accuracy FILE[,SETTING=VALUE].. --data DIR`.

The tasks are those of lm_eval (EleutherAI's evaluation harness, extra `eval`), with its prompts and
its scoring. The questions come from the text collection, because lm_eval would download them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from gguf_tools.columns import aligned
from gguf_tools.process import compute_threads
from models.real.bootstrap import Values, interval, shown
from models.real.command import reporting_errors
from orchestrator.errors import ConfigError

# Longest question with an answer, in tokens.
_CONTEXT = 512


class LocalTask(NamedTuple):
    """A task of lm_eval whose questions are in the text collection.

    - definition: the task's file in lm_eval's folder of tasks.
    - questions: the file in the collection; in a ZIP archive, after "::".
    - replaced: fields of the definition that the collection stores in another form.
    """

    definition: str
    questions: str
    replaced: Mapping[str, str | None] = {}

    @property
    def name(self) -> str:
        """The name under which lm_eval reports the task."""
        return Path(self.definition).stem

    def write(self, folder: Path, data: Path) -> Path:
        """Write a definition of the task that reads its questions from `data`, and return its path.

        folder: where the file is written, and questions from an archive. data: the text collection.
        Raises ConfigError if the questions are missing or damaged.
        """
        name, _, inside = self.questions.partition("::")
        questions = data / name
        if not questions.is_file():
            raise ConfigError(
                f"{questions} is missing: --data names the folder of the text collection"
            )
        if inside:
            try:
                with ZipFile(questions) as archive:
                    questions = Path(archive.extract(inside, folder))
            except (BadZipFile, KeyError) as error:
                raise ConfigError(
                    f"{questions} has no {inside}: --data names the folder of the text collection"
                ) from error
        written = folder / f"{self.name}.yaml"
        fields: dict[str, object] = {
            "include": str(files("lm_eval") / "tasks" / self.definition),
            "task": self.name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {"test": str(questions)},
                "cache_dir": str(folder / "cache"),
            },
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        written.write_text(json.dumps({**fields, **self.replaced}))  # JSON is also YAML
        return written


TASKS = (
    LocalTask(
        "arc/arc_easy.yaml",
        "eval/arc_easy.test.jsonl.xz",
        {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"},
    ),
    LocalTask(
        "blimp/anaphor_number_agreement.yaml",
        "eval/blimp/BLiMP.zip::data/anaphor_number_agreement.jsonl",
    ),
)


def solved(model: str, tasks: Sequence[Path], items: int, threads: int) -> dict[str, Values]:
    """Return 1 for each solved item and 0 for the others, by the name of the task.

    An item is solved if its answer has the greatest log-likelihood of all choices (lm_eval's acc).

    - model: a model file, and settings of moe-edge in the form of lm_eval's model arguments, such
      as "FILE,policy=dymoe,retention=0.75".
    - tasks: definitions of lm_eval tasks.
    - items: maximum number of items of each task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.utils import simple_parse_args_string

    from orchestrator.lab.eval.harness import MoeEdgeLM

    settings = simple_parse_args_string(f"model={model}")
    lm = MoeEdgeLM(**{"ctx": _CONTEXT, "threads": threads} | settings)
    with closing(lm.runtime):
        found = simple_evaluate(lm, tasks=[*map(str, tasks)], limit=items, bootstrap_iters=0)
    samples = found["samples"].items()
    return {
        name: np.array([item["acc"] for item in sorted(each, key=lambda item: item["doc_id"])])
        for name, each in samples
    }


def percent(values: Values) -> str:
    """Return a mean in percent with its 95 % interval over items."""
    return shown([100 * each for each in interval(values, np.arange(len(values)))], digits=1)


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.accuracy", description=__doc__)
    models = "model files with settings, such as FILE,high_tier=q4_1; compared with the first"
    parser.add_argument("models", nargs="+", help=models)
    parser.add_argument("--data", type=Path, required=True, help="folder of the text collection")
    parser.add_argument("--items", type=int, default=200, help="items of each task")
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")
    args = parser.parse_args(argv)
    threads = compute_threads(args.threads)
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}  # before lm_eval is imported
    try:
        import orchestrator.lab.eval.harness  # noqa: F401 - its error names the package to install
    except ImportError as error:
        raise ConfigError(str(error)) from error
    with TemporaryDirectory() as folder:
        tasks = [task.write(Path(folder), args.data) for task in TASKS]
        results = [solved(model, tasks, args.items, threads) for model in args.models]
    for name, first in results[0].items():
        rows = [["model", "solved, % (95 %)", "difference from the first, points (95 %)"]]
        for model, found in zip(args.models, results, strict=True):
            file, comma, settings = model.partition(",")
            minus = "" if found is results[0] else percent(found[name] - first)
            rows.append([f"{Path(file).name}{comma}{settings}", percent(found[name]), minus])
        print("\n".join([f"{name}: {len(first)} items", *aligned(rows)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
