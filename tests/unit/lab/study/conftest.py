"""Shared fixtures of study tests, and the result of each study."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
from judged import choices, model, text

from orchestrator.config import Config
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.study import dymoe, dynaexq, near_data, votes
from orchestrator.lab.study.subject import Subject

__all__ = ["choices", "domains", "found", "model", "text"]

TEXTS = {
    "river": "The fox sat by the river and looked at the stars. Nobody came, and it was late. ",
    "sums": "1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6, 4 + 4 = 8, 5 + 5 = 10, 6 + 6 = 12, 7 + 7 = 14. ",
}

STUDIES = {
    "accuracy": dymoe.Accuracy,
    "retention": dymoe.Retention,
    "critical": dymoe.Critical,
    "depth": dymoe.Depth,
    "similarity": dymoe.Similarity,
    "demotion": dynaexq.Demotion,
    "memory": dynaexq.HotMemory,
    "equal": dynaexq.EqualMemory,
    "votes": votes.VotesStudy,
    "context": near_data.PromptContext,
    "near-bits": near_data.NearBits,
}


@pytest.fixture(scope="session")
def domains(tmp_path_factory):
    """A text with two domains."""
    path = tmp_path_factory.mktemp("domains") / "domains.jsonl"
    records = [{"text": 2 * text, "domain": name} for name, text in TEXTS.items()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# Studies that split the text into halves need all of it. Others use a part.
WHOLE = ("demotion", "memory", "near-bits")
# One size of the hot set suffices, and takes half the time.
MORE = {"near-bits": {"hot_experts": 2}}


@pytest.fixture(scope="session")
def found(model, domains, tmp_path_factory):
    """found(name): result of a study on the random model; each study runs once.

    tables: their titles and rows, as in the JSON. panels: their number. said: notes. passes: the
    number of passes over the text.
    """
    asked = tmp_path_factory.mktemp("asked") / "choices.jsonl"
    records = [
        {"question": f"Question {i}: which one?", "choices": ["river", "a fox"], "answer": i % 2}
        for i in range(4)
    ]
    asked.write_text("".join(json.dumps(record) + "\n" for record in records))

    @cache
    def run(name):
        said = []
        config = Config.build(model=model, threads=1, ctx=128, **MORE.get(name, {}))
        tokens = None if name in WHOLE else 48
        options = EvalOptions(text=domains, choices=asked, tokens=tokens, window=16)
        on = Subject(config, options, lambda what, done: None, said.append)
        made = STUDIES[name]().measure(on)
        tables = [{"title": each.title, "rows": list(each.rows)} for each in made.tables]
        return SimpleNamespace(
            tables=json.loads(json.dumps(tables)),
            panels=len(made.panels),
            said=said,
            passes=on.passes,
            tokens=on.n_tokens,
        )

    return run
