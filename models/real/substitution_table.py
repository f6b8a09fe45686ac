"""Show results of `models.real.substitution`.

Usage: `python -m models.real.substitution_table FILE.json.. [--draw FOLDER]`.

Prints one table for each file: the KL divergence of each way relative to that of skipping, at the
same number of experts that are waited for, with 95 % intervals over documents. --draw writes a
picture of the KL divergences, with one panel for each file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.columns import aligned
from models.real.bootstrap import DRAWS, Values, draws, ends, shown
from models.real.command import reporting_errors
from models.real.substitution import BIAS, SKIP, WAYS, Choice, choices
from orchestrator.errors import ConfigError
from orchestrator.lab.plotting import Line, Panel, draw

NAME = "substitution"


class Results:
    """The results of a file that models.real.substitution wrote, with bootstrap draws.

    _draws [draws, windows] says how often each draw contains each window of the text. The first
    draw contains each window once.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it is invalid or has no finished window."""
        try:
            self.found: dict[str, Any] = json.loads(path.read_text())
            self.windows: list[dict[str, Any]] = self.found["windows"]
            self.levels: list[float] = self.found["levels"]
            self.biases: list[float] = self.found["biases"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: no results of models.real.substitution") from error
        if not self.windows:
            raise ConfigError(f"{path}: no window is finished")
        self._draws = draws(len(self.windows))
        self._tokens = self._draws @ np.array([each["tokens"] for each in self.windows])

    def of(self, choice: Choice, name: str) -> Values:
        """Return the value `name` of a configuration per token, for each bootstrap draw."""
        values = np.array([each[choice.label][name] for each in self.windows], float)
        if name in ("waited", "missed"):  # these values are means over the window's tokens
            values *= np.array([each["tokens"] for each in self.windows])
        found: Values = self._draws @ values / self._tokens
        return found

    def over_skip(self, choice: Choice) -> Values:
        """Return the KL divergence of a configuration, divided by that of skipping experts.

        There is one value for each bootstrap draw. Skipping is compared at the level at which the
        same number of missing experts is used. Its KL divergence there is interpolated between the
        measured levels.
        """
        skips = [Choice(SKIP, level) for level in sorted(self.levels, reverse=True)]
        waited = np.stack(
            [*(self.of(each, "waited") for each in skips), self.of(skips[0], "missed")]
        )
        kl = np.stack([*(self.of(each, "kl") for each in skips), np.zeros(DRAWS)])
        mine, at = self.of(choice, "kl"), self.of(choice, "waited")
        found: Values = np.array(
            [
                mine[draw] / np.interp(at[draw], waited[:, draw], kl[:, draw])
                for draw in range(DRAWS)
            ]
        )
        return found

    def perplexity(self, choice: Choice) -> Values:
        """Return the perplexity of a configuration, divided by that of the whole model.

        There is one value for each bootstrap draw.
        """
        base = self._draws @ np.array([each["nll"] for each in self.windows]) / self._tokens
        found: Values = np.exp(self.of(choice, "nll") - base)
        return found

    @property
    def title(self) -> str:
        """A line that names the model, the text, the experts and the number of tokens."""
        each = self.found
        return (
            f"{each['model']}, {each['text']}, {each['n_used']} of {each['n_expert']} experts, "
            f"{each['resident']} resident; {len(self.windows)} documents, {self._tokens[0]} tokens"
        )


def table(results: Results) -> str:
    """Format the results as a table with one row per configuration."""
    rows = [["", "waited for", "KL, nats", "KL over skip", "perplexity", "same top token"]]
    for choice in choices(results.levels, results.biases):
        share = results.of(choice, "waited")[0] / results.of(choice, "missed")[0]
        rows.append(
            [
                choice.label,
                f"{100 * share:.0f} %",
                shown(ends(results.of(choice, "kl")), 4),
                shown(ends(results.over_skip(choice)), 2),
                shown(ends(results.perplexity(choice)), 3),
                f"{100 * results.of(choice, 'same')[0]:.1f} %",
            ]
        )
    squared = results.found["squared_correlation"]
    note = (
        f"squared correlation of outputs: mean {np.mean(squared):.4f}, least {min(squared):.4f}, "
        f"most {max(squared):.4f} of the layers' means"
    )
    return "\n".join([results.title, *aligned(rows), note])


def panel(results: Results) -> Panel:
    """Return a plot of the KL divergence of each configuration.

    The x axis is the share of missing experts that were used nevertheless.
    """
    lines = []
    drawn = [*((way, results.levels) for way in WAYS), (BIAS, results.biases)]
    for way, levels in drawn:
        each_level = [Choice(way, level) for level in levels]
        x = [
            100 * float(results.of(each, "waited")[0] / results.of(each, "missed")[0])
            for each in each_level
        ]
        y = [
            [float(kl[0]), float(kl.std())]
            for kl in (results.of(each, "kl") for each in each_level)
        ]
        lines.append(Line(way, x, y, dashed=way == BIAS))
    return Panel(
        "missing experts that are waited for, %",
        "KL from all experts, nats a token",
        lines,
        results.title.replace("; ", ";\n"),
        scale="log",
    )


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.real.substitution_table", description=__doc__
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--draw", type=Path, help=f"folder for {NAME}.png and {NAME}.svg")
    args = parser.parse_args(argv)
    found = [Results(path) for path in args.files]
    print("\n\n".join(table(each) for each in found))
    if args.draw is not None:
        rows = 2 if len(found) > 2 and len(found) % 2 == 0 else 1
        draw(args.draw, NAME, [panel(each) for each in found], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
