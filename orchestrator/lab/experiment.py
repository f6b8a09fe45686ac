"""The form of every experiment."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from orchestrator.cache.files import whole_files
from orchestrator.lab.table import Table

On = TypeVar("On")
Found = TypeVar("Found")


class Experiment(ABC, Generic[On, Found]):
    """Measures something and shows it as tables.

    On is what it is measured on: the model with the loop over processes of a benchmark
    (`orchestrator.lab.bench.loop`), or the model with the text of a study
    (`orchestrator.lab.study.subject`). Found is what came of it. An experiment keeps nothing
    between its calls.
    """

    @abstractmethod
    def measure(self, on: On) -> Found:
        """Measures everything; raises MoeEdgeError where that cannot begin."""

    @abstractmethod
    def tables(self, found: Found) -> list[Table]:
        """All figures, as tables."""

    def draw(self, found: Found, folder: Path) -> list[Path]:
        """Writes the pictures to a folder and returns their paths. Needs matplotlib."""
        return []

    def write(
        self,
        folder: Path,
        name: str,
        found: Found,
        tables: Sequence[Table],
        data: Mapping[str, Any],
    ) -> None:
        """Writes the tables as NAME.md, the data as NAME.json and the pictures to a folder, which
        is made: all of them or none. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n\n".join(table.markdown() for table in tables)
        written = json.dumps(data, indent=1) + "\n"
        with whole_files(folder, f"{name}.md") as made:
            (made / f"{name}.md").write_text(text + "\n")
            (made / f"{name}.json").write_text(written)
            self.draw(found, made)
