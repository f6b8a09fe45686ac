"""Read the text collection given with `--data` for the generators of training data."""

from __future__ import annotations

import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.demo.training import facts, tales
from models.demo.training.smalltalk import IDENTITY
from models.demo.training.talk import TERM_QUESTIONS, Sources, Turn, turns_of

GLOSSARY_TERMS = 600
# Everyday words that the glossary defines in an unusual sense.
_ODD_TERMS = frozenset(
    "time system work body group process public second control order down structure period mass "
    "response function model results concept fact section series range activity service source "
    "position hand head base product flow test note contrast units roles discussion parallel start "
    "construction origin introduction deep velocity style aggregate component anterior parent "
    "daughter superior recall signal root henry shell lateral axis confederate opposition category "
    "recognition inferior variation concentrated linear orbit translation intermediate empirical "
    "matrix radius intensity entry extension circular dissolved extinction medial bias abstract "
    "storage tract plane peak rotation bridge conscious resolution arm cranial conclusion reserves "
    "channel fusion script trust corn strain crown carrier overlap fluids consensus tail thyroid "
    "gray productive reconstruction extinct tone conception initiative crowd integration soluble "
    "displacement elevation values participants posterior depression polarization absorption "
    "direction length class media suicide sex response interview law power field unit joint "
    "resistance kingdom motor host hair decay stock self tension stimulus foot seed domain hearing "
    "attachment pump mirror leg primates disability uncertainty accuracy sample radioactive "
    "confederacy labor tax free will reading writing heading sexuality".split()
)
_BAD_REPLY = re.compile(r"Suicide|name|created|human|virtual hug", re.I)
_STORY_START = re.compile(
    r"^(Once|One day|One |There (was|were|lived)|Long ago|In a |[A-Z][a-z]+ (was|had|loved|liked)"
    r"|[A-Z][a-z]+ and [A-Z][a-z]+ (were|are|like))"
)


class DataError(ValueError):
    """Raised if a required file is missing in the folder of the text collection."""


def records(data: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of `DATA/NAME.jsonl`, or of the compressed file with `.xz`.

    Raises DataError if neither file exists.
    """
    for path in (data / f"{name}.jsonl.xz", data / f"{name}.jsonl"):
        if path.exists():
            opener = lzma.open if path.suffix == ".xz" else open
            with opener(path, "rt", encoding="utf-8") as f:
                for line in f:
                    yield json.loads(line)
            return
    raise DataError(f"{data}: {name}.jsonl.xz not found; see models/demo/README.md")


def glossary(data: Path) -> tuple[list[Turn], list[str]]:
    """Return the most common glossary terms, each with one definition.

    The second value is the list of all other terms. `data` is the folder of the text collection.
    """
    defs: dict[str, Turn] = {}
    for r in records(data, "sft/openstax_glossary"):
        answer = r["messages"][1]["content"].strip()
        m = re.match(r"(.{2,60}?)(?: refers to the following)?: (.+)$", answer, re.S)
        if not m:
            continue
        term = re.sub(r"\s*\([^)]*\)", "", m[1]).strip()
        text = re.sub(r"^\((also|or)[^)]*\)\s*", "", m[2]).strip().rstrip(".")
        text = re.split(r"(?<=[a-z]{3})\. |; ", text)[0]
        size = len(text.split())
        key = term.lower()
        odd = not term.isascii() or len(term.split()) > 3 or ":" in text or key in _ODD_TERMS
        if odd or not 4 <= size <= 22 or re.match(r"(is|are|describes|secretes)\b", text):
            continue
        if key not in defs or abs(size - 12) < abs(len(defs[key][1].split()) - 12):
            defs[key] = (term, text)
    count = _term_counts(data, set(defs))
    ranked = sorted(defs, key=lambda k: (-count[k], k))
    known, other = [], []
    for rank, key in enumerate(ranked):
        term, text = defs[key]
        # A proper name keeps its capital. Other terms are written in lower case, as people type.
        shown = term if term[1:] != term[1:].lower() else key
        if rank < GLOSSARY_TERMS:
            known.append((shown, _definition(term, text)))
        else:
            other.append(shown)
    return known, other


def _definition(term: str, text: str) -> str:
    """Return a definition as a sentence.

    The sentence is "Inflation is the ..." if that is good English, otherwise "Inflation: ...".
    """
    top = term[0].upper() + term[1:]
    plural = re.search(r"[^su]s$", term) and not term.endswith(("ics", "is"))
    if not plural and re.match(r"(the|a|an) ", text):
        return f"{top} is {text}."
    return f"{top}: {text}."


def _term_counts(data: Path, terms: set[str]) -> Counter[str]:
    count: Counter[str] = Counter()
    for name in ("train/textbooks_ccby", "train/enwiki_core"):
        for r in records(data, name):
            words = re.findall(r"[a-z0-9'-]+", r["text"].lower())
            for n in (1, 2, 3):
                for gram in zip(*(words[i:] for i in range(n)), strict=False):
                    key = " ".join(gram)
                    if key in terms:
                        count[key] += 1
    return count


def unknown_questions(data: Path, known: set[str], terms: list[str]) -> list[str]:
    """Return questions of many kinds that the model should decline to answer.

    `data` is the folder of the text collection. `known` are terms and countries that the model
    knows. `terms` are glossary terms that it does not know.
    """
    rng = random.Random(11)
    out: list[str] = []
    for name, limit in (
        ("sft/dolly15k", 9000), ("sft/opentriviaqa", 6000), ("sft/gsm8k.train", 1500),
        ("sft/oasst1_en", 3000), ("sft/mcq_arc_obqa.train", 1500), ("sft/self_instruct_seed", 200),
    ):  # fmt: skip
        found = []
        for r in records(data, name):
            q = r["messages"][0]["content"].strip()
            q = q.split("\nA. ")[0] if rng.random() < 0.8 else q
            if 8 <= len(q) <= 220 and not _about_known(q, known):
                found.append(q)
        rng.shuffle(found)
        out += found[:limit]
    titles = [r["title"] for r in records(data, "train/enwiki_recent")][:4000] + terms
    for t in titles:
        if len(t) < 50 and t.lower() not in known:
            q = rng.choice((*TERM_QUESTIONS, "Who is {t}?", "Who was {t}?", "What is {t} about?"))
            out.append(q.format(t=t, a=f"{tales.article(t)} {t}"))
    return out


def _about_known(question: str, known: set[str]) -> bool:
    """Return whether a question asks about one of the known terms or countries."""
    q = question.lower().strip(" ?.!")
    m = re.match(
        r"(?:what(?:'s| is| are| does)|define|explain|describe|tell me about)"
        r"(?: what)?(?: an?| the| term)* (.+?)(?: mean| is)?$",
        q,
    )
    if m and (m[1] in known or m[1].rstrip("s") in known):
        return True
    return bool(re.search(r"capital|currency|continent|\bstory\b|\bjoke\b|who are you|tale\b", q))


def small_talk(data: Path) -> dict[str, list[str]]:
    """Return small talk as a dict from each answer to the questions that fit it.

    Answers that contradict the model's identity are left out.
    """
    own = {a.lower() for asks, _ in IDENTITY for a in asks}
    out: dict[str, list[str]] = {}
    for r in records(data, "dialog/ms_personality_chat"):
        for q, a in turns_of(r):
            if not _BAD_REPLY.search(a) and q.lower() not in own and len(a) > 8:
                out.setdefault(a, []).append(q)
    return out


def dialogs(data: Path) -> list[list[Turn]]:
    out = []
    for name in ("dialog/synthetic_persona_chat", "dialog/self_dialogue"):
        for n, r in enumerate(records(data, name)):
            turns = turns_of(r)
            if len(turns) >= 3 and n < 4000:
                out.append(turns[:6])
    return out


def tiny_stories(data: Path) -> list[str]:
    """Return the single stories in the TinyStories sample.

    The sample does not mark where a story ends, so the ends are guessed.
    """
    out = []
    for r in records(data, "train/tinystories_sample"):
        text = r["text"].replace("\r", "")
        wide = text.count("\n\n") > text.count("\n") / 4
        border = r"(?<!\n)\n(?!\n)" if wide else r"\n+(?=Once |One day, (?:a|an|there) )"
        parts = re.split(border, text)
        for p in parts:
            p = p.strip()
            if _STORY_START.match(p) and 40 <= len(p.split()) <= 230 and p[-1] in '.!?"':
                out.append(re.sub(r"\n+", "\n\n", p))
    return out


def short_stories(data: Path) -> list[tuple[str, str]]:
    """Return short stories as (hero, story), for answers to "tell me a story".

    The hero is "" if it is unclear.
    """
    out = [(_subject(s), s) for s in tiny_stories(data)]
    for r in records(data, "train/stories_ccby"):
        text = re.sub(r"^# .*\n+", "", r["text"]).strip()
        odd = re.search(r"!!|\.\.\.\.|Look!", text)
        if 50 <= len(text.split()) <= 230 and _STORY_START.match(text) and not odd:
            out.append((_subject(text), text))
    return out


def _subject(text: str) -> str:
    """Return the hero of a story, such as "a fox", from its first sentences.

    Returns "" if the hero is unclear.
    """
    head = " ".join(text.split()[:45]).lower()
    for kind in tales.subjects():
        if re.search(rf"\b(a|an|the) (\w+ )?{kind}\b", head):
            return f"{tales.article(kind)} {kind}"
    return ""


def prose(data: Path) -> list[str]:
    """Return whole stories that are not part of a chat, to learn style from."""
    stories = tiny_stories(data)
    for name in ("train/stories_ccby", "train/stories_fairytaleqa"):
        stories += [r["text"] for r in records(data, name)]
    return stories


def load_sources(data: Path) -> Sources:
    """Load all texts of the text collection from which conversations are generated.

    This takes about a minute.
    """
    known_terms, other_terms = glossary(data)
    known = {t.lower() for t, _ in known_terms}
    countries = facts.load_countries(list(records(data, "sft/world_factbook_qa")))
    known |= {n.lower() for c in countries for n in (c.name, c.shown, *c.aliases)}
    return Sources(
        countries=countries,
        glossary=known_terms,
        unknown=unknown_questions(data, known, other_terms),
        small_talk=small_talk(data),
        dialogs=dialogs(data),
        stories=short_stories(data),
    )
