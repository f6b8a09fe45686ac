"""The demo model's held-out text and questions, from sources made up here."""

import random

from models.demo.training import facts, heldout
from models.demo.training.talk import Sources
from orchestrator.lab.eval.judge import read_questions
from orchestrator.lab.eval.text import read_documents

CAPITALS = {"Aland": "One", "Bland": "Two", "Cland": "Three", "Dland": "Four", "Eland": "Five"}


def sources():
    countries = [
        facts.Country(name, name, (), capital, {"capital": f"The capital of {name} is {capital}."})
        for name, capital in CAPITALS.items()
    ]
    glossary = [("ohm", "Ohm: a unit."), ("zinc", "Zinc is a metal."), ("ion", "Ion: charged.")]
    return Sources(countries=countries, glossary=[*glossary, ("sun", "Sun: a star.")])


def test_questions_have_one_right_choice_about_the_same_thing(tmp_path):
    rng = random.Random(1)
    found = [
        *heldout.fact_questions(sources(), rng),
        *heldout.term_questions(sources(), rng),
        *heldout.story_questions(rng, 20),
    ]
    path = tmp_path / "choices.jsonl"
    heldout.write(path, found)
    questions = read_questions(path)
    assert len(questions) >= 5 + 4 + 15
    assert all(len(set(each.choices)) == heldout.N_CHOICES for each in questions)
    capitals = [each for each in questions if "capital" in each.prompt]
    assert len(capitals) == 5
    for each in capitals:
        country = each.choices[0].split()[3]
        assert all(c.startswith(f"The capital of {country} is ") for c in each.choices)
        assert each.choices[each.answer] == f"The capital of {country} is {CAPITALS[country]}."
    assert {each.answer for each in questions} == {0, 1, 2, 3}


def test_without_data_there_is_our_own_text(tmp_path):
    text, choices, calibration = (tmp_path / f"{name}.jsonl" for name in "abc")
    words = ["--out", str(text), "--choices", str(choices), "--calibration", str(calibration)]
    assert heldout.main([*words, "--chats", "6", "--questions", "8"]) == 0
    assert len(read_documents(text)) >= 6
    assert len(read_questions(choices)) == 4
    own = {each.text for each in read_documents(text)}
    assert not own & {each.text for each in read_documents(calibration)}
