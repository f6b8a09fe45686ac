"""The demo model's held-out text and questions, from sources made up here."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

from models.demo.training import facts, heldout
from models.demo.training.talk import Sources, chat_documents
from orchestrator.lab.eval.choices import read_questions
from orchestrator.lab.eval.text import read_documents

REPO = Path(__file__).resolve().parents[2]


CAPITALS = {"Aland": "One", "Bland": "Two", "Cland": "Three", "Dland": "Four", "Eland": "Five"}


def sources() -> Sources:
    countries = [
        facts.Country(name, name, (), capital, {"capital": f"The capital of {name} is {capital}."})
        for name, capital in CAPITALS.items()
    ]
    glossary = [("ohm", "Ohm: a unit."), ("zinc", "Zinc is a metal."), ("ion", "Ion: charged.")]
    return Sources(countries=countries, glossary=[*glossary, ("sun", "Sun: a star.")])


def test_a_chat_record_is_an_answer_behind_all_that_was_said(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    assert heldout.write(path, heldout.chat_records(sources(), 20)) >= 20
    documents = read_documents(path)
    assert all(each.context.endswith("<|im_start|>assistant\n") for each in documents)
    assert all(each.text.endswith("<|im_end|>") for each in documents)
    whole = [
        "".join(text for text, _ in pieces)
        for pieces in chat_documents(sources(), heldout.SEED, 20, heldout.FINAL_WEIGHTS, 0.5)
    ]
    assert all(any(w.startswith(d.context + d.text) for w in whole) for d in documents)


def test_documents_begin_as_those_of_the_held_out_part(tmp_path: Path) -> None:
    (tmp_path / "valid").mkdir()
    for name, path in heldout.DOCUMENTS.items():
        lines = [json.dumps({"text": f"{name} {n} " + "x" * 9000}) for n in range(3)]
        (tmp_path / f"{path}.jsonl").write_text("\n".join(lines))
    out = tmp_path / "documents.jsonl"
    found = list(heldout.document_records(tmp_path))
    assert heldout.write(out, found) == 12
    documents = read_documents(out)
    assert {each.domain for each in documents[:4]} == set(heldout.DOCUMENTS)
    assert all(d.text.startswith(d.domain) and len(d.text) == 1600 for d in documents)


def test_every_beginning_is_a_mixture() -> None:
    found = list(heldout.mixed([{"n": "a"}] * 30, [{"n": "b"}] * 10))
    assert len(found) == 40
    for n in range(4, 41, 4):
        assert sum(each["n"] == "b" for each in found[:n]) == n // 4


def test_text_to_calibrate_on_is_whole_and_of_its_own_seed(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    stories = "".join(json.dumps({"text": f"Story {i}."}) + "\n" for i in range(9))
    (tmp_path / "train/stories_ccby.jsonl").write_text(stories)
    found = heldout.calibration_records(sources(), tmp_path, 12, 6)
    assert [each["domain"] for each in found].count("stories") == 6
    chats = [each["text"] for each in found if each["domain"] == "chat"]
    assert len(chats) == 12 and all(each.startswith("<|im_start|>") for each in chats)
    judged = [
        "".join(text for text, _ in pieces)
        for pieces in chat_documents(sources(), heldout.SEED, 12, heldout.FINAL_WEIGHTS, 0.5)
    ]
    assert chats != judged


def test_questions_have_one_right_choice_about_the_same_thing(tmp_path: Path) -> None:
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


def test_too_few_other_answers_make_no_question() -> None:
    rng = random.Random(1)
    assert not list(heldout.multiple_choice(rng, "Q", "a", ["b", "b", "a", "c"]))
    (one,) = heldout.multiple_choice(rng, "Q", "a", itertools.cycle("abcd"))
    assert sorted(one["choices"]) == list("abcd") and one["choices"][one["answer"]] == "a"


def test_it_runs_without_torch_and_says_what_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from models.demo.training import heldout\n"
        f"sys.exit(heldout.main(['--data', {json.dumps(str(tmp_path))}, '--out', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "openstax_glossary.jsonl.xz not found" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_data_there_is_our_own_text(tmp_path: Path) -> None:
    text, choices, calibration = (tmp_path / f"{name}.jsonl" for name in "abc")
    words = ["--out", str(text), "--choices", str(choices), "--calibration", str(calibration)]
    assert heldout.main([*words, "--chats", "6", "--questions", "8"]) == 0
    assert len(read_documents(text)) >= 6
    assert len(read_questions(choices)) == 4
    own = {each.text for each in read_documents(text)}
    assert not own & {each.text for each in read_documents(calibration)}
