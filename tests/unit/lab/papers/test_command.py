"""`moe-edge paper`: its lists are closed, it resumes, and it refuses in one sentence."""

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gguf_tools import synthetic
from gguf_tools.file.layout import GGMLType
from gguf_tools.synthetic.shapes import preset
from orchestrator.cli.main import cli
from orchestrator.lab.papers import paper as papers
from orchestrator.lab.papers.paper import Compared, Figure, Made, Paper, Unavailable
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.registry import PAPERS, load_paper
from orchestrator.lab.table import Column, Table

sys.path.append(str(Path(__file__).parents[2] / "gguf"))

LISTED = {
    "dymoe": "Table 1, Table 2, Table 3, Figure 3, Figure 4, Figure 5, Figure 6, Figure 10, "
    "Figure 11",
    "dynaexq": "Table 1, Table 2, Table 4, Figure 1, Figure 2, Figure 3, Figure 6, Figure 7, "
    "Figure 8, Figure 9, Figure 10",
    "firm": "Table 1, Table 2, Figure 4, Figure 5, Figure 6, Figure 7",
    "context": "Table 3, Figure 2, Figure 3, Figure 4, Figure 5, Figure 6",
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_list_of_tables_and_figures_is_closed(name):
    paper = load_paper(name)
    assert paper.name == name
    assert ", ".join(figure.name for figure in paper.figures) == LISTED[name]
    for figure in paper.figures:
        assert figure.measure is not None or figure.why


def first(on):
    table = Table("T", (Column("a", "a"), Column("b", "b", "{:.1f}".format)), [{"a": 1, "b": 2.0}])
    panel = Panel("x", "y", [Line("l", [1, 2], exact([1.0, 2.0]))])
    return Made([Compared("speed", "1.8 times", "1.1 times", "another machine")], [table], [panel])


def second(on):
    return Made(
        [
            Compared("loss", "not in the text", "0.1"),
            Compared("KL", "0.2", "0.3", "another model"),
            Compared("perplexity", "4", "5", "another model"),
        ]
    )


def without(on):
    raise Unavailable("the text has one domain")


FIGURES = (
    Figure("Table 1", "speed", first),
    Figure("Figure 2", "loss", second),
    Figure("Figure 3", "domains", without),
    Figure("Figure 4", "a picture", why="the paper has no such figure"),
)


@pytest.fixture
def calls(monkeypatch):
    """The names of the figures that were measured, of a paper that is made up."""
    seen = []

    def counted(figure):
        def measure(on):
            seen.append(figure.name)
            return figure.measure(on)

        return replace(figure, measure=figure.measure and measure)

    made = Paper("firm", "Made up", [counted(figure) for figure in FIGURES])
    monkeypatch.setattr("orchestrator.cli.paper.load_paper", lambda name: made)
    return seen


def run(model, out, *more):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    words = ["paper", "firm", "-m", model, "--out", out, *more]
    return CliRunner().invoke(cli, [*map(str, words)])


@pytest.fixture
def model(tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k", seed=1)


def test_each_line_has_the_paper_ours_and_the_reason(model, tmp_path, calls):
    result = run(model, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "firm.json").read_text()) == found
    table, loss, domains, picture = found["figures"]
    assert table["compared"] == [
        {"what": "speed", "paper": "1.8 times", "here": "1.1 times", "why": "another machine"}
    ]
    assert table["tables"][0]["rows"] == [["1", "2.0"]]
    assert loss["compared"][0]["why"] == ""
    assert domains["compared"][0]["here"] == picture["compared"][0]["here"] == "not made"
    assert domains["compared"][0]["why"] == "the text has one domain"
    assert picture["compared"][0]["why"] == "the paper has no such figure"
    assert (tmp_path / "table-1.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "table-1.svg").exists() and not (tmp_path / "figure-2.png").exists()
    shown = (tmp_path / "firm.md").read_text()
    assert "| speed | 1.8 times | 1.1 times | another machine |" in shown
    assert "| 1 | 2.0 |" in shown
    text = run(model, tmp_path).stdout
    assert "  speed\n    paper: 1.8 times\n    here:  1.1 times\n" in text
    assert "    why different: another machine" in text


def test_a_repeated_reason_is_shown_once(model, tmp_path, calls):
    text = run(model, tmp_path).stdout
    assert text.count("why different: another model") == 1 and "why different: the same" in text
    shown = (tmp_path / "firm.md").read_text()
    assert "| KL | 0.2 | 0.3 | another model |" in shown
    assert "| perplexity | 4 | 5 | the same |" in shown


def test_results_name_the_text_the_machine_and_the_day(model, tmp_path, calls):
    result = json.loads(run(model, tmp_path, "--json").stdout)
    (day, machine) = {(each["day"], each["machine"]) for each in result["figures"]}.pop()
    title = (tmp_path / "firm.md").read_text().splitlines()[0]
    assert title.startswith(f"# Made up: {model.name}, text: chat (")
    assert title.endswith(f"; measured on {machine}, {day}") and " cores" in machine


def test_a_repeated_command_measures_what_is_missing(model, tmp_path, calls):
    assert run(model, tmp_path, "--only", "figure 2, Figure 4").exit_code == 0
    assert calls == ["Figure 2"] and not (tmp_path / "firm.json").exists()
    assert run(model, tmp_path).exit_code == 0
    # A figure that the text cannot show is tried again: another text may show it.
    assert calls == ["Figure 2", "Table 1", "Figure 3"]
    assert run(model, tmp_path).exit_code == 0
    assert calls[3:] == ["Figure 3"]
    (tmp_path / "table-1.json").unlink()
    assert run(model, tmp_path).exit_code == 0
    assert calls[4:] == ["Table 1", "Figure 3"]
    assert not list(tmp_path.glob("text-*"))


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "Table 1"}', ""])
def test_a_damaged_file_is_named_and_the_others_stay(model, tmp_path, calls, text):
    assert run(model, tmp_path).exit_code == 0
    path = tmp_path / "table-1.json"
    path.write_text(text)
    kept = (tmp_path / "figure-2.json").read_text()
    result = run(model, tmp_path)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {path} is damaged: delete it to me")
    assert (tmp_path / "figure-2.json").read_text() == kept


def test_results_of_another_model_or_text_are_not_mixed(model, tmp_path, calls, tiny_model):
    assert run(model, tmp_path / "out").exit_code == 0
    other = tiny_model("olmoe", "q8_0", "q2_k")
    data = tmp_path / "data"
    data.mkdir()
    (data / "river.txt").write_text("The fox sat by the river. " * 40)
    for result in (run(other, tmp_path / "out"), run(model, tmp_path / "out", "--data", data)):
        assert result.exit_code == 1
        assert "was measured with another model or text: choose another --out" in result.stderr


def test_max_tokens_limits_the_text_and_belongs_to_the_results(model, tmp_path, calls, monkeypatch):
    limit = ("--max-tokens", 600)
    result = run(model, tmp_path, *limit)
    assert result.exit_code == 0 and ", at most 600 tokens; measured on" in result.stdout
    assert run(model, tmp_path, *limit).exit_code == 0
    result = run(model, tmp_path)
    assert result.exit_code == 1 and "was measured with another model or text" in result.stderr

    found = []
    made = Paper("firm", "", [Figure("Table 1", "", lambda on: found.append(on.subject()))])
    monkeypatch.setattr("orchestrator.cli.paper.load_paper", lambda name: made)
    result = run(model, tmp_path / "few", "--max-tokens", 100)
    assert result.exit_code == 1 and not found
    last = result.stderr.splitlines()[-1]
    assert "scored tokens, the minimum is 512: use a larger --max-tokens" in last


def test_a_full_disk_is_one_sentence_and_finished_rows_stay(model, tmp_path, calls, monkeypatch):
    write = papers.write_whole

    def full(path, text):
        if path.name == "figure-2.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(papers, "write_whole", full)
    result = run(model, tmp_path)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last == f"Error: {tmp_path / 'figure-2.json'}: No space left on device"
    assert (tmp_path / "table-1.json").exists() and not (tmp_path / "figure-2.json").exists()


def dense(folder):
    """A dense model's header."""
    from gguf_craft import (
        model_metadata,
        write_model,  # ty: ignore
    )

    tensors = [("token_embd.weight", (64, 3), GGMLType.F32)]
    return write_model(folder / "dense.gguf", tensors, model_metadata("llama", expert_count=None))


def one_layer(folder):
    shape = replace(preset("tiny-qwen3moe"), n_layer=1)
    return synthetic.write(folder / "one.gguf", shape, tiers=("q8_0", "q2_k"))


def one_tier(folder):
    return synthetic.write(folder / "plain.gguf", "tiny-qwen3moe", tiers=("q8_0",))


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (dense, (), "`moe-edge paper` needs a MoE model"),
        (one_layer, (), "has one MoE layer, but the papers compare layers"),
        (one_tier, (), "q8_0, but `moe-edge paper firm` compares several"),
        (
            None,
            ("--only", "Table 9"),
            "--only 'Table 9' names no table or figure of the paper firm: choose from",
        ),
        (None, ("--data", "EMPTY"), "has no texts: give a folder with .jsonl or .txt files"),
    ],
)
def test_what_cannot_be_used_is_refused(model, tmp_path, calls, make, more, message):
    (tmp_path / "empty").mkdir()
    words = [tmp_path / "empty" if word == "EMPTY" else word for word in more]
    result = run(model if make is None else make(tmp_path), tmp_path / "out", *words)
    assert result.exit_code == 1 and not calls
    assert message in result.stderr.splitlines()[-1]


def test_a_paper_needs_matplotlib(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(cli, ["paper", "firm", "-m", str(model), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.endswith("a plot needs matplotlib: run `pip install 'moe-edge[plot]'`\n")
