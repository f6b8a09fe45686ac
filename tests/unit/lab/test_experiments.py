"""Every experiment has the same form: names, options, tables."""

import dataclasses

import pytest

from orchestrator.lab.registry import BENCHMARKS, load
from orchestrator.lab.table import WIDTH, Column, Table, fixed, percent


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_the_form(name):
    benchmark = load(name)
    options = benchmark.options()
    for option, declared in options.declared().items():
        assert getattr(options, option) == declared.default, option
        if declared.notation is not None and declared.shown is None:
            text = declared.default_text or "1"
            assert declared.parse(text) == (declared.default or (1,))
    assert {field.name for field in dataclasses.fields(options)} == set(options.declared())


NAME = Column("", "name", left=True)
SPEED = Column("speed", "speed", fixed(1), "ms")
ROWS = [
    {"name": "a", "speed": 12.34, "share": 0.5},
    {"name": "longer", "share": 1.0},
    {"name": "b", "error": "died"},
]


def test_a_table_is_text_markdown_and_data():
    table = Table(
        "T", (NAME, SPEED, Column("of it", "share", percent(0, " %"))), ROWS, ["and so on"]
    )
    assert table.text().splitlines() == [
        "T",
        "        speed ms  of it",
        "a           12.3   50 %",
        "longer            100 %",
        "b       died",
        "  and so on",
    ]
    assert table.markdown().splitlines() == [
        "**T**",
        "",
        "|        | speed ms | of it |",
        "|--------|----------|-------|",
        "| a      | 12.3     | 50 %  |",
        "| longer |          | 100 % |",
        "| b      | died     |       |",
        "",
        "and so on",
    ]
    found = table.as_dict()
    assert found["columns"] == ["", "speed ms", "of it"]
    assert (found["data"], found["notes"]) == (ROWS, ["and so on"])
    assert found["rows"][1] == ["longer", "", "100 %"]


def test_text_is_wrapped_to_the_terminal():
    wide = tuple(Column("column", "share", percent(1)) for _ in range(12))
    table = Table("word " * 40, (NAME, *wide), [*ROWS[:1], {"name": "c", "error": "x" * 200}])
    table.footnotes.append("  indented " + "word " * 40)
    lines = table.text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    # indentation of the note plus that of continued lines
    assert lines[-1].startswith("      word")
