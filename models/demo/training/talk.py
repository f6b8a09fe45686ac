"""Generate single questions with answers, and conversations.

Every generator returns (question, answer) texts and uses the `random.Random` that it is given, so
that a seed determines the whole data set.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.demo.training import facts, tales
from models.demo.training.smalltalk import (
    IDENTITY,
    INTENTS,
    REFUSALS,
    REFUSE_CODE,
    REFUSE_MATH,
    REFUSE_NOW,
    SYSTEM_PROMPTS,
    code_question,
    math_question,
    now_question,
    unknown_country_question,
)

Turn = tuple[str, str]

TERM_QUESTIONS = (
    "What is {t}?", "What is {a}?", "Define {t}.", "Define \"{t}\".", "What does {t} mean?",
    "What does the term \"{t}\" mean?", "Explain {t}.", "Can you explain what {t} is?",
    "What's {t}?", "What's {a}?", "define {t}", "Give me the definition of {t}.",
    "What is meant by {t}?", "Explain {t} in simple terms.", "Please explain the term {t}.",
    "Do you know what {t} is?", "Tell me what {t} means.", "meaning of {t}", "{t}?",
    "I need a definition of {t}.", "What do you know about {t}?", "Tell me about {t}.",
)  # fmt: skip
TERM_HELD_OUT = ("How would you define {t}?", "Could you say what {t} means?")

STORY_QUESTIONS = (
    "Tell me a story about {a}.", "Tell me a short story about {a}.", "Write a story about {a}.",
    "Can you tell me a story about {a}?", "I want to hear a story about {a}.",
    "Please tell me a story about {a}.", "Make up a story about {a}.", "a story about {a}",
    "Could you write a short children's story about {a}?", "Tell me a bedtime story about {a}.",
    "Tell a story with {a} in it.", "Story about {a}, please.", "Write a short story about {a}.",
    "Do you know a story about {a}?", "Give me a story about {a}.",
)  # fmt: skip
STORY_NAMED = (
    "Tell me a story about {a} named {n}.", "Write a story about {a} called {n}.",
    "Can you tell me a short story about {n}, {a}?", "Tell me about {n} the {k}.",
)  # fmt: skip
STORY_ANY = (
    "Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Write a story.",
    "I would like to hear a story.", "Tell me a bedtime story.", "Do you know a good story?",
    "Please tell me a story for my child.", "Story time!", "Make up a story.", "Another story!",
    "I can't sleep. Tell me a story.", "Tell me another story.", "Once upon a time...",
)  # fmt: skip
STORY_LEADS = ("", "", "", "Sure! ", "Here is a story. ", "Of course! ")

# Shares of the kinds of questions. An answer with a story is about six times as long as another.
CHAT_WEIGHTS = {
    "fact": 0.34, "glossary": 0.28, "story": 0.06, "small": 0.13, "identity": 0.05,
    "refuse": 0.14, "dialog": 0.02,
}  # fmt: skip
FINAL_WEIGHTS = {
    "fact": 0.34, "glossary": 0.29, "story": 0.05, "small": 0.12, "identity": 0.09,
    "refuse": 0.11,
}  # fmt: skip


def casual(rng: random.Random, q: str) -> str:
    """Rewrite a question at random as people type it in a chat.

    It may get a greeting, be in lower case, or lose its question mark.
    """
    roll = rng.random()
    if roll < 0.10:
        lead = rng.choice((
            "Hey, ", "Please tell me: ", "Quick question: ", "Hi! ", "Hello, ", "ok, ", "So, ",
            "Now tell me: ", "I have a question. ", "Thanks! ", "And ", "Hmm, ", "Great. ",
        ))  # fmt: skip
        q = lead + (q[0].lower() + q[1:] if lead[-2] in ",d" and q[:2] != "I " else q)
    elif roll < 0.14:
        q = q.rstrip("?.!") + rng.choice((" please?", ", please.", "??", " ?", "!"))
    if rng.random() < 0.22:
        q = q.lower()
    if rng.random() < 0.22:
        q = q.rstrip("?.")
    return q


@dataclass
class Sources:
    """The texts from which conversations are generated, such as facts, terms and stories."""

    countries: list[facts.Country] = field(default_factory=list)
    glossary: list[Turn] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    small_talk: dict[str, list[str]] = field(default_factory=dict)
    dialogs: list[list[Turn]] = field(default_factory=list)
    stories: list[tuple[str, str]] = field(default_factory=list)


class Talker:
    """Generates questions with answers, and whole conversations, from `Sources`."""

    def __init__(self, sources: Sources, rng: random.Random) -> None:
        self.src, self.rng = sources, rng
        self.replies = list(sources.small_talk)
        self.kinds: dict[str, Callable[[], Turn]] = {
            "fact": self.fact, "glossary": self.glossary, "story": self.story,
            "small": self.small, "identity": self.identity, "refuse": self.refuse,
        }  # fmt: skip

    def fact(self, country: facts.Country | None = None) -> Turn:
        rng = self.rng
        if not self.src.countries:
            return self.identity()
        c = country or rng.choice(self.src.countries)
        kinds = list(c.answers)
        kind = rng.choices(kinds, [3.0 if k in ("capital", "about") else 1.0 for k in kinds])[0]
        return casual(rng, ask_fact(rng, c, kind)), c.answers[kind]

    def glossary(self) -> Turn:
        rng = self.rng
        if not self.src.glossary:
            return self.identity()
        term, answer = rng.choice(self.src.glossary)
        return casual(rng, ask_term(rng, term)), answer

    def story(self) -> Turn:
        rng = self.rng
        lead = rng.choice(STORY_LEADS)
        if self.src.stories and rng.random() < 0.4:
            subject, text = rng.choice(self.src.stories)
            text, subject = recast(rng, text, subject)
            if not subject or rng.random() < 0.2:
                return casual(rng, rng.choice(STORY_ANY)), lead + text
            q = rng.choice(STORY_QUESTIONS)
            return casual(rng, q.format(a=subject)), lead + text
        if rng.random() < 0.2:
            return casual(rng, rng.choice(STORY_ANY)), lead + tales.tale(rng)[0]
        text, hero = tales.tale(rng, rng.choice(tales.subjects()))
        a = f"{tales.article(hero.kind)} {hero.kind}"
        if rng.random() < 0.25:
            q = rng.choice(STORY_NAMED).format(a=a, n=hero.name, k=hero.kind)
            return q, lead + text
        return casual(rng, rng.choice(STORY_QUESTIONS).format(a=a)), lead + text

    def small(self) -> Turn:
        rng = self.rng
        if not self.replies or rng.random() < 0.55:
            asks, says = rng.choice(INTENTS)
            return casual(rng, rng.choice(asks)), rng.choice(says)
        answer = rng.choice(self.replies)
        return rng.choice(self.src.small_talk[answer]), answer

    def identity(self) -> Turn:
        asks, says = self.rng.choice(IDENTITY)
        return casual(self.rng, self.rng.choice(asks)), self.rng.choice(says)

    def refuse(self) -> Turn:
        rng = self.rng
        roll = rng.random()
        if roll < 0.07:
            return casual(rng, math_question(rng)), rng.choice(REFUSE_MATH)
        if roll < 0.12:
            return casual(rng, code_question(rng)), rng.choice(REFUSE_CODE)
        if roll < 0.18:
            return casual(rng, now_question(rng)), rng.choice(REFUSE_NOW)
        if roll < 0.30 and self.src.countries:
            name = rng.choice(self.src.countries).shown
            return casual(rng, unknown_country_question(rng, name)), rng.choice(REFUSALS)
        if self.src.unknown:
            return casual(rng, rng.choice(self.src.unknown)), rng.choice(REFUSALS)
        return code_question(rng), rng.choice(REFUSE_CODE)

    def follow_ups(self) -> list[Turn]:
        """Return a question about a country, followed by questions that only make sense after it.

        A follow-up question says "it", or only names another country. Each question has an answer.
        """
        rng = self.rng
        c = rng.choice(self.src.countries)
        kinds = [k for k in facts.FOLLOW_UPS if k in c.answers]
        first, *rest = rng.sample(kinds, min(len(kinds), rng.choice((2, 2, 3))))
        turns = [(casual(rng, ask_fact(rng, c, first)), c.answers[first])]
        last = first
        for k in rest:
            turns.append((casual(rng, rng.choice(facts.FOLLOW_UPS[k])), c.answers[k]))
            last = k
        if rng.random() < 0.5:
            other = rng.choice(self.src.countries)
            if last in other.answers:
                ask = rng.choice(("And {c}?", "What about {c}?", "How about {c}?", "And of {c}?"))
                turns.append((ask.format(c=other.shown), other.answers[last]))
        return turns

    def conversation(self, weights: dict[str, float], single: float) -> list[Turn]:
        """Return one generated conversation as (question, answer) pairs.

        `weights` are the shares of the kinds of questions. `single` is the probability that the
        conversation has only one question.
        """
        rng = self.rng
        if self.src.dialogs and rng.random() < weights.get("dialog", 0.0):
            return rng.choice(self.src.dialogs)
        kinds = [k for k in self.kinds if weights.get(k)]
        shares = [weights[k] for k in kinds]
        count = 1 if rng.random() < single else rng.choice((2, 2, 3, 3, 4, 5, 8))
        turns: list[Turn] = []
        while len(turns) < count:
            kind = rng.choices(kinds, shares)[0]
            if kind == "fact" and self.src.countries and count > 1 and rng.random() < 0.35:
                turns += self.follow_ups()
            else:
                turns.append(self.kinds[kind]())
        return turns

    def system(self) -> str:
        return self.rng.choice(SYSTEM_PROMPTS) if self.rng.random() < 0.12 else ""


def ask_fact(rng: random.Random, c: facts.Country, kind: str) -> str:
    name = rng.choice(c.aliases) if c.aliases and rng.random() < 0.4 else c.shown
    return rng.choice(facts.QUESTIONS[kind]).format(c=name, v=c.capital)


def ask_term(rng: random.Random, term: str) -> str:
    return rng.choice(TERM_QUESTIONS).format(t=term, a=f"{tales.article(term)} {term}")


_NAME = re.compile(r"\b[A-Z][a-z]+\b")
_ALL_NAMES = {**dict.fromkeys(tales.GIRLS, "she"), **dict.fromkeys(tales.BOYS, "he")}
_MORE = {
    "she": "Lily Lucy Sara Anna Mia Amy Sue Jane Emily Lila Lola Kitty Mary Jill Sally Bella",
    "he": "Tim Tom Ben Max Jack Sam John Bob Billy Joe Timmy Tommy Johnny Spot Fred Bobby",
}
_ALL_NAMES |= {n: k for k, v in _MORE.items() for n in v.split()}
# Animals with a regular plural, so that an animal of a story can be replaced by another.
_SWAPPABLE = "dog cat rabbit bear pig squirrel lion tiger monkey hedgehog goat".split()


def recast(rng: random.Random, text: str, subject: str) -> tuple[str, str]:
    """Return a story with other names, and its new subject.

    If the story is about one animal, it may also get another animal.
    """
    found = {n for n in _NAME.findall(text) if n in _ALL_NAMES}
    free = {"she": [], "he": []}  # type: dict[str, list[str]]
    for n, k in _ALL_NAMES.items():
        if n not in found:
            free[k].append(n)
    swap = {n: free[_ALL_NAMES[n]].pop(rng.randrange(len(free[_ALL_NAMES[n]]))) for n in found}
    animals = [a for a in _SWAPPABLE if re.search(rf"\b{a}s?\b", text)]
    kind = subject.split()[-1] if subject else ""
    if animals == [kind] and rng.random() < 0.7:
        other = rng.choice([a for a in _SWAPPABLE if a != kind])
        text = re.sub(rf"\b{kind}(s?)\b", rf"{other}\1", text)
        text = re.sub(rf"\b{kind.capitalize()}(s?)\b", rf"{other.capitalize()}\1", text)
        subject = f"{tales.article(other)} {other}"
    text = _NAME.sub(lambda m: swap.get(m[0], m[0]), text)
    return text, subject


def render(turns: Sequence[Turn], system: str = "") -> list[tuple[str, bool]]:
    """Return a conversation in the chat template, in pieces of (text, flag).

    The flag is True for the answers, which the model should learn.
    """
    out: list[tuple[str, bool]] = []
    if system:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for question, answer in turns:
        out.append((f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False))
        out.append((f"{answer}<|im_end|>", True))
        out.append(("\n", False))
    return out


def chat_documents(
    sources: Sources, seed: int, count: int, weights: dict[str, float], single: float
) -> Iterator[list[tuple[str, bool]]]:
    talker = Talker(sources, random.Random(seed))
    for _ in range(count):
        yield render(talker.conversation(weights, single), talker.system())


def turns_of(record: dict[str, Any]) -> list[Turn]:
    """Return the (user, assistant) pairs of a chat record.

    A last message without an answer is left out.
    """
    m = [x["content"].strip() for x in record["messages"]]
    return list(zip(m[::2], m[1::2], strict=False))
