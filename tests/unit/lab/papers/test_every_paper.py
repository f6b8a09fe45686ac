"""Each paper once from end to end on a small random model, with few tokens: every table and figure
is made, and its details are possible."""

import json
from functools import cache

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.papers import context, dymoe, dynaexq, firm, measured
from orchestrator.lab.registry import PAPERS

TEXTS = {
    "river": "The fox sat by the river and looked at the stars. Nobody came, and it was late. ",
    "sums": "1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6, 4 + 4 = 8, 5 + 5 = 10, 6 + 6 = 12, 7 + 7 = 14. ",
}
SMALL = {
    measured: {"TOKENS": 96, "WINDOW": 24, "ROUTED": 192, "SEQUENCE": 24, "LEAST": 16},
    firm: {
        **{"PROMPT": 8, "ANSWER": 40, "SHARES": (0.5, 0.9), "HELD": 0.6, "LOGITS": 48},
        **{"PROMPTS": (4, 8), "ANSWERS": (8, 16)},
    },
    context: {"PROMPT": 8, "ANSWER": 40, "LAGS": (1, 4)},
    dymoe: {
        "SHARES": (0.5, 0.75),
        "LENGTHS": (4, 8),
        "STEPS": 8,
        "ROUNDS": 1,
        "PROMPT": 32,
        "FEW": 96,
        "ANSWER": 16,
    },
    dynaexq: {
        **{"BATCHES": (1, 2), "PROMPT": 8, "STEPS": 4, "ROUNDS": 1, "LENGTHS": (4, 8, 16)},
        **{"TIMES": 2, "HELD": 0.6},
    },
}


@pytest.fixture(scope="session")
def found(library, tiny_model, tmp_path_factory):
    """found(name): result of a paper's command; each runs once."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    data = tmp_path_factory.mktemp("data")
    for name, text in TEXTS.items():
        records = [json.dumps({"text": 2 * text}) for _ in range(4)]
        (data / f"{name}.jsonl").write_text("\n".join(records))
    model = tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k", seed=1)

    @cache
    def run(name):
        out = tmp_path_factory.mktemp(name)
        words = ["paper", name, "-m", model, "--data", data, "--out", out, "--threads", "1"]
        with pytest.MonkeyPatch.context() as patch:
            for module, constants in SMALL.items():
                for constant, value in constants.items():
                    patch.setattr(module, constant, value)
            result = CliRunner().invoke(cli, [*map(str, words), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout), out

    return run


@pytest.mark.parametrize("name", PAPERS)
def test_every_table_and_figure_is_made(found, name):
    result, out = found(name)
    assert "river, sums" in result["text"]
    for figure in result["figures"]:
        stem = figure["name"].lower().replace(" ", "-")
        assert figure["compared"]
        for row in figure["compared"]:
            assert all(isinstance(each, str) for each in row.values())
            assert row["what"] and row["paper"] and row["here"]
            assert "nan" not in row["here"]
        made = figure["compared"][0]["here"] != "not made"
        assert made == (figure["name"] != "Figure 8")
        if made and (name, figure["name"]) not in NO_PICTURE:
            assert (out / f"{stem}.png").exists(), stem
    assert (out / f"{name}.md").read_text().startswith(f"# {result['title']}")


# Tables that are drawn with another figure of their paper.
NO_PICTURE = {("dymoe", "Table 2")}


def cells(found, name, figure, heading, table=0):
    """The cells of a column of a table of a figure."""
    result, _ = found(name)
    (made,) = (each for each in result["figures"] if each["name"] == figure)
    shown = made["tables"][table]
    at = shown["columns"].index(heading)
    return [row[at] for row in shown["rows"]]


def test_activated_experts_grow_with_the_batch(found):
    for figure in ("Table 1", "Table 2"):
        active = [float(cell.split()[0]) for cell in cells(found, "dynaexq", figure, "activated")]
        assert all(0 < each <= 100 for each in active)
        assert all(a <= b for a, b in zip(active[::2], active[1::2], strict=True))


def test_what_does_not_depend_on_the_machine_is_as_it_must_be(found):
    again = [float(cell.split()[0]) for cell in cells(found, "context", "Figure 3", "used again")]
    assert all(0 <= each <= 100 for each in again)
    ratios = [float(cell) for cell in cells(found, "firm", "Figure 6", "x smallest loss")]
    assert min(ratios) == 1.0 and len(ratios) % 6 == 0
    result, _ = found("context")
    (times,) = (each for each in result["figures"] if each["name"] == "Figure 5")
    assert times["compared"][0]["here"] == "5.33 and 8.00"
    fitted = [row for row in times["compared"] if "MoNDE" in row["what"]]
    assert len(fitted) == 4 and all("is fitted" in row["why"] for row in fitted)
