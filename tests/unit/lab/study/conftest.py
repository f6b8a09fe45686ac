"""Shared fixtures of study tests, and the output of each study."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from judged import choices, model, text

from orchestrator.cli.main import cli
from orchestrator.lab.study import study
from orchestrator.lab.study.subject import Passes

__all__ = ["choices", "domains", "model", "published", "text"]

TEXTS = {
    "river": "The fox sat by the river and looked at the stars. Nobody came, and it was late. ",
    "sums": "1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6, 4 + 4 = 8, 5 + 5 = 10, 6 + 6 = 12, 7 + 7 = 14. ",
}


@pytest.fixture(scope="session")
def domains(tmp_path_factory):
    """A text with two domains."""
    path = tmp_path_factory.mktemp("domains") / "domains.jsonl"
    records = [{"text": 2 * text, "domain": name} for name, text in TEXTS.items()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session", autouse=True)
def short_texts():
    """Allow short texts, because the tests check the tables and not their values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "LEAST_TOKENS", 16)
        yield


# Studies that split the text into halves need all of it. Others use a part.
WHOLE = ("demotion", "memory", "near-bits")
# One size of the hot set suffices, and takes half the time.
MORE = {"near-bits": ["--hot-experts", "2"]}


@pytest.fixture(scope="session")
def published(model, domains, tmp_path_factory):
    """published(name): output of a study on the random model; each study runs once.

    data: its JSON. shown: its printed text. folder: the folder of its files. passes, said: its
    passes over the text and its stderr.
    """
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")

    asked = tmp_path_factory.mktemp("asked") / "choices.jsonl"
    records = [
        {"question": f"Question {i}: which one?", "choices": ["river", "a fox"], "answer": i % 2}
        for i in range(4)
    ]
    asked.write_text("".join(json.dumps(record) + "\n" for record in records))

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        options = ["-m", str(model), "--threads", "1", "--ctx", "128", "--window", "16"]
        options += ["--text", str(domains), "--study", name, "--out", str(folder)]
        options += ["--choices", str(asked), *MORE.get(name, [])]
        if name not in WHOLE:
            options += ["--max-tokens", "48"]
        passes: list[Passes] = []
        begin = Passes.__init__

        def counted(self, *args):
            begin(self, *args)
            passes.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Passes, "__init__", counted)
            result = CliRunner().invoke(cli, ["eval", *options])
        assert result.exit_code == 0, result.output
        data = json.loads((folder / f"{name}.json").read_text())
        return SimpleNamespace(
            data=data, shown=result.stdout, folder=folder, passes=passes[0], said=result.stderr
        )

    return run
