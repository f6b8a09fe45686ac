"""A paper as a list of tables and figures, which are measured in turn and kept on disk.

Each finished table or figure is a file of the output folder, such as table-3.json. A command that
is repeated measures only what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.errors import GGUFError
from gguf_tools.experts import ExpertModel
from gguf_tools.process import processor_name
from orchestrator.cache.files import check_target, digest, read_object, whole_files, write_whole
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.papers.measured import Measured, Source
from orchestrator.lab.plotting import Panel, draw, require_matplotlib
from orchestrator.lab.table import Column, Row, Table
from orchestrator.runtime.load import Progress

NOT_IN_TEXT = "not in the text"
NOT_MADE = "not made"
# The keys of the file of one table or figure, and the largest file that is read back.
_KEYS = {"key", "name", "about", "day", "machine", "compared", "tables"}
_LARGEST_BYTES = 1 << 24


class Compared(NamedTuple):
    """One line of a comparison: the paper's value, our value, and why they differ."""

    what: str
    paper: str
    here: str
    why: str = ""


@dataclass(slots=True)
class Made:
    """Our measured version of one table or figure of a paper.

    `compared` are the lines that compare it with the paper. `tables` hold its numbers. `panels` are
    the plots of its picture, which are arranged in `rows` rows.
    """

    compared: list[Compared]
    tables: list[Table] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    rows: int = 1


class Unavailable(ConfigError):
    """Raised if the model or the text is not sufficient for a table or figure of a paper."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A table or figure of a paper.

    - name: its name in the paper, such as "Table 3".
    - about: its subject in a few words.
    - measure: measures our version of it. None if this machine cannot make it.
    - paper: the values in the paper's text, which are shown if nothing is measured.
    - why: the reason why nothing is measured.
    """

    name: str
    about: str
    measure: Callable[[Measured], Made] | None = None
    paper: str = NOT_IN_TEXT
    why: str = ""

    @property
    def stem(self) -> str:
        """The name of the figure's files without an ending, such as table-3."""
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper whose tables and figures can be reproduced.

    - name: the name in the command, such as "dymoe".
    - least_tiers: minimum number of precisions in the model's file.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    least_tiers: int = 2

    def chosen(self, only: str | None) -> list[Figure]:
        """Return the tables and figures whose names `only` lists, separated by commas.

        None returns all of them. Raises ConfigError for an unknown name.
        """
        if only is None:
            return list(self.figures)
        known = {each.name: each for each in self.figures}
        asked = [name.strip() for name in only.split(",")]
        for name in asked:
            if name.title() not in known:
                raise ConfigError(
                    f"--only '{name}' names no table or figure of the paper {self.name}: choose "
                    f"from {', '.join(known)}"
                )
        return [known[name.title()] for name in asked]

    def check(self, config: Config) -> None:
        """Check that the model is sufficient for the tables and figures of this paper.

        It must have at least two MoE layers and `least_tiers` precisions. Raises ConfigError if
        not, and GGUFError if the model cannot be read or has no experts.
        """
        with ExpertModel.open(config.model, config.low) as model:
            if model.n_layers < 2:
                raise ConfigError(
                    f"{config.model} has one MoE layer, but the papers compare layers: use a "
                    f"model with at least two"
                )
            if len(model.tiers) < self.least_tiers:
                raise ConfigError(
                    f"{config.model} has only one precision, {model.tiers[0].name}, but "
                    f"`moe-edge paper {self.name}` compares several: use a file packed with "
                    f"several precisions, or --low FILE"
                )


def publish(
    paper: Paper,
    config: Config,
    folder: Path,
    source: Source,
    only: str | None,
    report: Progress,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the chosen tables and figures of a paper, and return their results for JSON.

    Results that an earlier run left in `folder` are not measured again. Each result is written to
    `folder` as soon as it is finished. `only` names the tables and figures. None measures all.

    Raises ConfigError for a model, a text or a folder that cannot be used, and OSError if a file
    cannot be written.
    """
    figures = paper.chosen(only)
    require_matplotlib()
    try:
        paper.check(config)
    except GGUFError as error:
        raise ConfigError(f"`moe-edge paper` needs a MoE model: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    check_target(folder / f"{paper.name}.json")
    with Measured(config, folder, source, report, note) as on:
        basis = {"paper": paper.name, "title": paper.title, **on.basis()}
        key = digest(basis)
        kept = {each: _kept(folder / f"{each.stem}.json", key) for each in figures}
        found = []
        for number, figure in enumerate(figures, 1):
            done = kept[figure]
            if done is None:
                note(f"{figure.name}, {number} of {len(figures)}: {figure.about}")
                done = _measured(figure, on, folder, key)
            found.append(done)
    result = {**basis, "figures": found}
    if only is None:
        with whole_files(folder, f"{paper.name}.md") as made:
            (made / f"{paper.name}.md").write_text(markdown(result) + "\n")
            (made / f"{paper.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _kept(path: Path, key: str) -> dict[str, Any] | None:
    """Return the result of a table or figure from an earlier run, or None if there is no file.

    key: identifies the model and the text. Raises ConfigError if the file is damaged or has another
    key.
    """
    if not path.exists():
        return None
    done = read_object(path, _LARGEST_BYTES)
    if done is None or not done.keys() >= _KEYS:
        raise ConfigError(
            f"{path} is damaged: delete it to measure it again, or choose another --out"
        )
    if done["key"] != key:
        raise ConfigError(
            f"{path} was measured with another model or text: choose another --out, or delete it"
        )
    return done


def _measured(figure: Figure, on: Measured, folder: Path, key: str) -> dict[str, Any]:
    """Measure a table or figure, and write its JSON file and pictures.

    If the model or text cannot show it, the result says why, and no file is written.
    """
    start_s = time.monotonic()
    try:
        made, kept = _made(figure, on), True
    except Unavailable as reason:
        made, kept = Made([Compared(figure.about, figure.paper, NOT_MADE, str(reason))]), False
    done = {
        "key": key,
        "name": figure.name,
        "about": figure.about,
        "day": time.strftime("%Y-%m-%d"),
        "machine": f"{processor_name()}, {len(os.sched_getaffinity(0))} cores",
        "seconds": round(time.monotonic() - start_s),
        "compared": [each._asdict() for each in made.compared],
        "tables": [table.as_dict() for table in made.tables],
    }
    if kept:
        # The JSON file comes last: it says that the pictures are complete.
        if made.panels:
            draw(folder, figure.stem, made.panels, made.rows)
        write_whole(folder / f"{figure.stem}.json", json.dumps(done) + "\n")
    # The same types as in a file that is read back.
    same: dict[str, Any] = json.loads(json.dumps(done))
    return same


def _made(figure: Figure, on: Measured) -> Made:
    if figure.measure is None:
        return Made([Compared(figure.about, figure.paper, NOT_MADE, figure.why)])
    return figure.measure(on)


def _compared_markdown(figure: Row) -> str:
    """Return the lines that compare one table or figure with the paper, as a Markdown table.

    A reason that repeats the one above it is "the same".
    """
    rows, last = [], ""
    for row in figure["compared"]:
        why = "the same" if last and row["why"] == last else row["why"]
        last = row["why"]
        cells = (row["what"], row["paper"], row["here"], why)
        rows.append(" | ".join(cell.replace("|", "/") for cell in cells))
    head = ["| what is compared | paper | our result | why different |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {row} |" for row in rows)]).replace("|  |", "| |")


def heading(result: dict[str, Any]) -> str:
    """Return one line that names the paper, model, text, machine and dates of the results."""
    machines = dict.fromkeys(figure["machine"] for figure in result["figures"])
    days = sorted({figure["day"] for figure in result["figures"]})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{result['title']}: {result['model']}, text: {result['text']}; measured on "
        f"{' and on '.join(machines)}, {when}"
    )


def render(result: dict[str, Any]) -> str:
    """Format the results of a paper for a terminal.

    Each line of a comparison has the paper's value, our value, and the reason for the difference.
    """
    parts = [heading(result)]
    for figure in result["figures"]:
        lines, last = [f"{figure['name']}: {figure['about']}"], ""
        for row in figure["compared"]:
            lines += [f"  {row['what']}", f"    paper: {row['paper']}", f"    here:  {row['here']}"]
            why = "the same" if row["why"] == last else row["why"]
            lines += [f"    why different: {why}"] if row["why"] else []
            last = row["why"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def compared_markdown(result: dict[str, Any]) -> str:
    """Format the comparison of our results with a paper's results in Markdown.

    Each figure or table of the paper becomes one Markdown table, with the paper's values, our
    values, and the reasons for differences. Our other tables and the plots are left out.

    - result: the results of the paper's figures and tables, from `publish`.
    """
    return "\n\n".join(
        f"**{figure['name']}**: {figure['about']}\n\n{_compared_markdown(figure)}"
        for figure in result["figures"]
    )


def markdown(result: dict[str, Any]) -> str:
    """Format a paper's results in Markdown: the comparisons and all tables."""
    parts = [f"# {heading(result)}"]
    for figure in result["figures"]:
        parts += [f"## {figure['name']}: {figure['about']}", _compared_markdown(figure)]
        for table in figure["tables"]:
            parts.append(_plain_markdown(table))
    return "\n\n".join(parts)


def _plain_markdown(table: Row) -> str:
    """Format a table from a JSON file in Markdown. Its cells are text."""
    columns = [Column(name, str(at)) for at, name in enumerate(table["columns"])]
    rows = [{str(at): cell for at, cell in enumerate(row)} for row in table["rows"]]
    return Table(table["title"], columns, rows, list(table["notes"])).markdown()
