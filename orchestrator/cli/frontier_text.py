"""A frontier of plans as text and as a picture. The picture needs matplotlib, the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf_tools.columns import aligned
from gguf_tools.units import format_size
from orchestrator.cost.plans import PROMPT_TOKENS, Candidate, Frontier
from orchestrator.cost.speeds import DISTURBED
from orchestrator.lab.plotting import COLOURS, save_figure

_HEAD = ("", "plan", "tiers", "experts", "ms/token", "tok/s", "first prompt", "prompt", "KL, nats")
# Below it, a picture of KL is even and no longer logarithmic: lossless plans are at its foot.
_LEAST_KL = 1e-4
# Plans whose KL nobody knows stand so many times above the others.
_ABOVE = 4.0


def render(found: Frontier, best: str) -> str:
    """The plans, the fastest first. best: the tier that KL is counted from."""
    rows = [
        (
            "*" if each is found.taken else "+" if each.best else "",
            each.label,
            "/".join(each.tiers),
            format_size(each.expert_bytes),
            f"{1e3 * each.token_s:.1f}",
            f"{1 / each.token_s:.1f}",
            f"{each.first_prompt_s:.1f} s",
            f"{each.prompt_s:.1f} s",
            _kl(each),
        )
        for each in found.candidates
    ]
    return "\n".join(
        [
            *aligned([list(_HEAD), *map(list, rows)]),
            f"Prompts have {PROMPT_TOKENS} tokens, and KL is the mean from {best}; 0 is lossless. "
            f"+: no other plan is both faster and closer; *: taken.",
            f"`chat` and `serve` take {found.why}",
            *([DISTURBED] if found.disturbed else []),
        ]
    )


def _kl(each: Candidate) -> str:
    if each.kl is None:
        return "?"
    return "<= " * each.at_most + (f"{each.kl:.2g}" if each.kl else "0")


def draw(found: Frontier, title: str, path: Path) -> None:
    """Writes the plans as points: milliseconds a token, and KL; those whose KL nobody knows are
    hollow, on a line above the others. Equal frontiers give equal SVG bytes. Raises OSError where
    the file cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "font.size": 10,
        "svg.hashsalt": "moe-edge",
        "svg.fonttype": "none",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.0, 5.2), layout="constrained")
        axes = figure.subplots()
        shown = found.candidates
        unknown = _ABOVE * max([_LEAST_KL, *(each.kl or 0.0 for each in shown)])

        def at(each: Candidate) -> tuple[float, float]:
            return 1e3 * each.token_s, unknown if each.kl is None else each.kl

        for number, name in enumerate(dict.fromkeys(each.name for each in shown)):
            mine = [each for each in shown if each.name == name]
            colour = COLOURS[number % len(COLOURS)]
            axes.scatter(
                [at(each)[0] for each in mine],
                [at(each)[1] for each in mine],
                s=44,
                marker="os^DvP"[number % 6],
                edgecolors=colour,
                facecolors=["none" if each.kl is None else colour for each in mine],
                zorder=3,
            )
            # full in the legend, whatever the points are
            marker = "os^DvP"[number % 6]
            axes.plot([], [], label=name, marker=marker, color=colour, linestyle="none")
        if any(each.kl is None for each in shown):
            axes.axhline(unknown, color="#999999", linewidth=1, linestyle=":")
            axes.annotate(
                "KL not known",
                (0.5, unknown),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        edge = [each for each in shown if each.best]
        for each in edge:  # of the others the table says which they are: labels would overlap
            axes.annotate(
                f"{each.name} {'/'.join(each.tiers)}",
                (1e3 * each.token_s, each.kl or 0.0),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
                rotation=30,  # neighbours often lose alike
                rotation_mode="anchor",
            )
        axes.step(
            [1e3 * each.token_s for each in edge],
            [each.kl or 0.0 for each in edge],
            where="post",
            color="#999999",
            linewidth=1,
        )
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": "black", "zorder": 4}
        axes.scatter(*at(found.taken), s=190, label="taken", **ring)
        axes.set_yscale("symlog", linthresh=_LEAST_KL)
        axes.set_ylim(bottom=-_LEAST_KL / 4)
        axes.yaxis.set_major_formatter(lambda kl, _: f"{kl:g}")  # its own are formulas
        axes.margins(x=0.12)
        axes.set_xlabel("predicted ms a token")
        axes.set_ylabel("predicted KL from the best tier, nats")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        save_figure(figure, path)
