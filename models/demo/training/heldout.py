"""Generate text and questions that the demo model has never seen, for evaluation and calibration.

`python -m models.demo.training.heldout --out FILE.jsonl [--data DIR] [--choices FILE.jsonl]
[--documents FILE.jsonl] [--calibration FILE.jsonl] [--loss-text FILE.jsonl]` writes JSON lines:

- --out: answers in new conversations, with the preceding conversation as context, because the model
  was not trained to write questions; and children's stories of the collection's held-out part.
- --documents: beginnings of stories, tales, textbook pages and encyclopedia articles, also held
  out.
- --choices: the model's facts and definitions in phrasings that it was not trained on, each with
  three answers to the same question about something else; and new stories, each with four possible
  next sentences.
- --calibration: other conversations, and stories that the model was trained on.
- --loss-text: conversations like these, and training text of each kind in LOSS_TEXT, so that the
  loss table shows how kinds of text differ.

--data names the text collection of the model card. Without it, all text comes from our own grammar:
stories, small talk and questions about the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from models.demo.training import facts, tales
from models.demo.training.sources import DataError, load_sources, records
from models.demo.training.talk import FINAL_WEIGHTS, TERM_HELD_OUT, Sources, chat_documents, render

SEED, CALIBRATION_SEED = 990_001, 880_001  # the training uses neither seed
N_CHOICES = 4
DOCUMENTS = {
    "stories": "valid/stories_ccby",
    "tales": "valid/stories_fairytaleqa",
    "textbook": "valid/textbooks_ccby",
    "encyclopedia": "valid/enwiki_core",
}
# Text collection files for the loss table, by kind of text. The model's own conversations are added
# to them.
LOSS_TEXT = {
    "stories": "train/stories_ccby",
    "tales": "train/stories_fairytaleqa",
    "textbook": "train/textbooks_ccby",
    "encyclopedia": "train/enwiki_core",
    "messages": "train/oasst1_messages_flat",
}
_LETTERS = 1600  # maximum length of a document, about 400 tokens

Record = dict[str, Any]


def chat_records(sources: Sources, count: int, last: bool = False) -> Iterator[Record]:
    """Generate `count` conversations, and return one record for each answer in them.

    With `last`, only the last answer of a conversation is used, so that records are independent.
    """
    for pieces in chat_documents(sources, SEED, count, FINAL_WEIGHTS, 0.5):
        before = ""
        found: list[Record] = []
        for text, is_answer in pieces:
            if is_answer:
                found.append({"context": before, "text": text, "domain": "chat"})
            before += text
        yield from found[-1:] if last else found


def story_records(data: Path | None, count: int) -> Iterator[Record]:
    if data is None:
        return iter(())
    found = itertools.islice(records(data, "valid/stories_ccby"), count)
    return ({"text": each["text"], "domain": "stories"} for each in found)


def document_records(data: Path) -> Iterator[Record]:
    """Return the beginnings of held-out documents, with the kinds of text evenly mixed.

    `data` is the folder of the text collection.
    """

    def kind(name: str) -> Iterator[Record]:
        for each in records(data, DOCUMENTS[name]):
            yield {"text": each["text"][:_LETTERS], "domain": name}

    return mixed(*map(kind, DOCUMENTS))


def calibration_records(
    sources: Sources, data: Path | None, chats: int, stories: int
) -> list[Record]:
    """Return a text to calibrate on: generated conversations, mixed with stories.

    The stories are from the training part of the text collection `data`.
    """
    talk = chat_documents(sources, CALIBRATION_SEED, chats, FINAL_WEIGHTS, 0.5)
    known = iter(()) if data is None else records(data, "train/stories_ccby")
    tell = itertools.islice(known, stories)
    return [
        *mixed(
            ({"text": "".join(text for text, _ in pieces), "domain": "chat"} for pieces in talk),
            ({"text": each["text"], "domain": "stories"} for each in tell),
        )
    ]


def loss_records(sources: Sources, data: Path | None, count: int) -> list[Record]:
    """Return a text for the loss table: `count` records of each kind of text, evenly mixed.

    Short texts of a kind are joined, so that most calibration windows contain only one kind of
    text.
    """

    def joined(texts: Iterable[str], domain: str) -> Iterator[Record]:
        text = ""
        for each in texts:
            text += each[:_LETTERS] + "\n"
            if len(text) >= 2 * _LETTERS:
                yield {"text": text, "domain": domain}
                text = ""

    talk = chat_documents(sources, CALIBRATION_SEED, 20 * count, FINAL_WEIGHTS, 0.5)
    kinds = [joined(("".join(text for text, _ in pieces) for pieces in talk), "chat")]
    if data is not None:
        for domain, name in LOSS_TEXT.items():
            kinds.append(joined((each["text"] for each in records(data, name)), domain))
    return [*mixed(*(itertools.islice(kind, count) for kind in kinds))]


def mixed(*parts: Iterable[Record]) -> Iterator[Record]:
    """Interleave several lists of records evenly.

    Any beginning of the result has about the same share of each list.
    """
    lists = [list(part) for part in parts]
    places = [
        ((index + 0.5) / len(part), number, index)
        for number, part in enumerate(lists)
        for index in range(len(part))
    ]
    for _, number, index in sorted(places):
        yield lists[number][index]


def fact_questions(sources: Sources, rng: random.Random) -> Iterator[Record]:
    """Yield a multiple-choice question for every country and kind of fact.

    The phrasings are those that the training never used.
    """
    for kind, asks in facts.HELD_OUT.items():
        if kind == "country_of":  # only the right answer would repeat the capital in the question
            continue
        known = [c for c in sources.countries if kind in c.answers]
        for country in known:
            others = (c.answers[kind].replace(c.shown, country.shown) for c in shuffled(rng, known))
            question = rng.choice(asks).format(c=country.shown, v=country.capital)
            yield from multiple_choice(rng, asked(question), country.answers[kind], others)


def term_questions(sources: Sources, rng: random.Random) -> Iterator[Record]:
    """Yield a multiple-choice question for the meaning of every glossary term.

    The wrong answers are the definitions of other terms.
    """
    for term, answer in sources.glossary:
        others = (
            term[0].upper() + term[1:] + other[len(name) :]
            for name, other in shuffled(rng, sources.glossary)
        )
        question = rng.choice(TERM_HELD_OUT).format(t=term)
        yield from multiple_choice(rng, asked(question), answer, others)


def story_questions(rng: random.Random, count: int) -> Iterator[Record]:
    """Yield multiple-choice questions that ask how a newly generated story continues.

    Wrong answers come from stories with the same hero.
    """
    for _ in range(count):
        kind = rng.choice(tales.subjects())
        text, hero = tales.tale(rng, kind)
        own = sentences(text)
        others: list[str] = []
        for _ in range(6):
            other, second = tales.tale(rng, kind)
            others += sentences(other.replace(second.name, hero.name))[2:]
        at = rng.randrange(2, len(own))
        yield from multiple_choice(rng, " ".join(own[:at]), own[at], shuffled(rng, others))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", re.sub(r"\s+", " ", text).strip())


def shuffled(rng: random.Random, items: Sequence[Any]) -> list[Any]:
    return rng.sample(items, len(items))


def asked(question: str) -> str:
    """Return a question in the chat template, up to the start of the answer."""
    return render([(question, "")])[0][0]


def multiple_choice(
    rng: random.Random, prompt: str, answer: str, others: Iterable[str]
) -> Iterator[Record]:
    """Yield one record with a question, the right answer and wrong answers in random order.

    The wrong answers are taken from `others`, in order and without duplicates. Yields nothing if
    `others` has too few different answers.
    """
    found = {answer: None}
    for each in others:
        found[each] = None
        if len(found) == N_CHOICES:
            break
    else:
        return
    choices = shuffled(rng, list(found))
    yield {"question": prompt, "choices": choices, "answer": choices.index(answer)}


def write(path: Path, found: Iterable[Record]) -> int:
    """Write records as JSON lines and return their number."""
    lines = [json.dumps(record, ensure_ascii=False) for record in found]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m models.demo.training.heldout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--data", type=Path, help="folder of the text collection named in the model card"
    )
    p.add_argument(
        "--out", type=Path, required=True, help="the text to write, for `moe-edge eval --text`"
    )
    p.add_argument(
        "--choices", type=Path, help="also write questions, for `moe-edge eval --choices`"
    )
    p.add_argument(
        "--documents", type=Path, help="also write documents, for `moe-edge eval --text`"
    )
    p.add_argument("--calibration", type=Path, help="also write calibration text")
    p.add_argument("--loss-text", type=Path, help="also write text for the loss table")
    p.add_argument("--chats", type=int, default=160, help="number of conversations in the text")
    p.add_argument(
        "--last-answers", action="store_true", help="use only the last answer of each conversation"
    )
    p.add_argument("--stories", type=int, default=20, help="number of stories in the text")
    p.add_argument(
        "--questions", type=int, default=400, help="number of questions, half of them about facts"
    )
    args = p.parse_args(argv)
    if args.documents and args.data is None:
        p.error("--documents needs the text collection: give --data")
    try:
        sources = Sources() if args.data is None else load_sources(args.data)
    except DataError as error:
        sys.exit(f"Error: {error}")
    text = mixed(
        chat_records(sources, args.chats, args.last_answers), story_records(args.data, args.stories)
    )
    print(f"{args.out}: {write(args.out, text)} texts")
    if args.documents:
        print(f"{args.documents}: {write(args.documents, document_records(args.data))} documents")
    if args.choices:
        rng = random.Random(SEED)
        kinds = (
            [*fact_questions(sources, rng), *term_questions(sources, rng)],
            [*story_questions(rng, args.questions)],
        )
        chosen = [
            question
            for found in kinds
            for question in rng.sample(found, min(args.questions // len(kinds), len(found)))
        ]
        print(f"{args.choices}: {write(args.choices, chosen)} questions")
    if args.calibration:
        # About 130,000 tokens.
        found = calibration_records(sources, args.data, 800, 80)
        print(f"{args.calibration}: {write(args.calibration, found)} texts to calibrate on")
    if args.loss_text:
        found = loss_records(sources, args.data, 8)
        print(f"{args.loss_text}: {write(args.loss_text, found)} texts for the loss table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
