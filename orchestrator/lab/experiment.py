"""The form of every experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from orchestrator.lab.table import Table

On = TypeVar("On")
Found = TypeVar("Found")


class Experiment(ABC, Generic[On, Found]):
    """Measures something and shows it as tables.

    On is what it is measured on: the model with the loop over processes of a benchmark
    (`orchestrator.lab.bench.loop`), or the model with the text of a study
    (`orchestrator.lab.study.subject`). Found is what came of it. An experiment keeps nothing
    between its calls. draws: it has a picture too.
    """

    draws: ClassVar[bool] = False

    @abstractmethod
    def measure(self, on: On) -> Found:
        """Measures everything; raises MoeEdgeError where that cannot begin."""

    @abstractmethod
    def tables(self, found: Found) -> list[Table]:
        """All figures, as tables."""

    def draw(self, found: Found, folder: Path) -> list[Path]:
        """Writes the pictures to a folder and returns their paths. Needs matplotlib."""
        return []
