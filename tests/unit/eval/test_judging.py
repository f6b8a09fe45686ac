"""Evaluation with the real engine and a random-weight model of a few megabytes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.config import Config
from orchestrator.events import Phase
from orchestrator.lab.eval.judge import Judge
from orchestrator.runtime.evaluator import log_softmax
from orchestrator.runtime.runtime import Runtime


def open_engine(model, **settings):
    settings = {"ctx": 256, "threads": 1, "ubatch": 64, "logits_all": True} | settings
    return Runtime.open(Config.build(model=model, **settings))


def evaluate(model, *args):
    options = ["-m", str(model), "--threads", "1", "--ctx", "256", "--window", "64", "--json"]
    result = CliRunner().invoke(cli, ["eval", *options, *args])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_rows_are_the_engines_logits(model):
    with open_engine(model, policy="lru", high_tier="q8_0") as runtime, runtime.evaluator() as e:
        tokens = e.tokenize("The fox sat by the river and looked.")
        rows = np.stack([row.copy() for row in Judge(e).rows(tokens)])
        whole = np.stack(list(Judge(e, prefill=True).rows(tokens)))
        expected = np.stack(
            [e.eval([t], i, phase=Phase.DECODE)[-1] for i, t in enumerate(tokens[:-1])]
        )
    assert np.array_equal(rows, expected)
    assert rows.shape == whole.shape
    assert np.corrcoef(rows.ravel(), whole.ravel())[0, 1] > 0.999


def test_rows_of_a_prompt_are_not_copied(model):
    """Rows are views of the context's logits. With a large vocabulary, a copy would take hundreds
    of MiB."""
    with open_engine(model, policy="lru", high_tier="q8_0") as runtime, runtime.evaluator() as e:
        tokens = e.tokenize("The fox sat by the river and looked. " * 10)[:101]
        rows = Judge(e, prefill=True).rows(tokens, 3)
        row = next(rows)
        assert np.shares_memory(row, e.inside.context.logits(64))
        found = np.stack([row.copy(), *(row.copy() for row in rows)])
        parts = [part.copy() for part in e.eval_each(tokens[:-1], 0, Phase.PREFILL)]
    assert [len(part) for part in parts] == [64, 36]
    assert np.array_equal(found, np.concatenate(parts)[2:])


def test_a_known_prefix_is_not_read_again(model, monkeypatch):
    with open_engine(model, policy="lru", high_tier="q8_0") as runtime, runtime.evaluator() as e:
        one = e.tokenize("The fox sat by the river and looked.")
        two = one[:5] + one[2:6]
        expected = [np.stack(list(Judge(e).rows(t, 4))) for t in (one, two)]
        assert np.array_equal(expected[0], np.stack(list(Judge(e).rows(one)))[3:])
        judge, read = Judge(e), []
        own = e.eval
        monkeypatch.setattr(e, "eval", lambda *a, **k: read.append(a[1]) or own(*a, **k))
        found = [np.stack(list(judge.rows(t, 4))) for t in (one, two)]
        assert read == [*range(len(one) - 1), *range(3, len(two) - 1)]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        judge.continuation(one, two)
        assert np.array_equal(np.stack(list(judge.rows(two, 4))), expected[1])


@pytest.mark.parametrize("prefill", [False, True])
def test_a_continuation_is_scored_by_the_rows_before_it(model, prefill):
    with open_engine(model, policy="lru", high_tier="q8_0") as runtime, runtime.evaluator() as e:
        context = e.tokenize("The fox sat by")
        choices = [e.tokenize(text) for text in (" the river", " a", " the river")]
        judge = Judge(e, prefill)
        found = [judge.continuation(context, choice) for choice in choices]
        for choice, (logp, greedy) in zip(choices, found, strict=True):
            rows = np.stack(list(Judge(e, prefill).rows([*context, *choice])))
            expected = log_softmax(rows[len(context) - 1 :])
            assert np.array_equal(logp, expected[np.arange(len(choice)), choice])
            assert greedy == (expected.argmax(axis=1) == choice).all()
        judge.continuation(context, choices[0])
        e.eval(context[::-1], 0)
        judge.forget()
        assert np.array_equal(judge.continuation(context, choices[0])[0], found[0][0])


def test_too_long_a_context_loses_its_oldest_tokens(model):
    with open_engine(model, policy="lru", high_tier="q8_0") as runtime, runtime.evaluator() as e:
        context = e.tokenize("one two three four five six seven eight " * 40)
        choice = context[:4]
        assert len(context) > e.n_ctx
        kept = context[-(e.n_ctx - len(choice)) :]
        long, short = Judge(e).continuation(context, choice), Judge(e)
        assert np.array_equal(long[0], short.continuation(kept, choice)[0])


def test_kl_of_the_best_tier_is_zero_and_of_a_low_one_positive(model, text, choices):
    same = evaluate(model, "--text", str(text), "--kl", "--policy", "lru", "--high-tier", "q8_0")
    assert same["text"]["kl"][0] == pytest.approx(0, abs=1e-6)
    assert same["text"]["top1"][0] == 1
    args = ("--text", str(text), "--choices", str(choices), "--kl")
    low = evaluate(model, *args, "--policy", "lru", "--high-tier", "q2_k")
    assert low["text"]["kl"][0] > 1e-4
    assert low["choices"]["questions"] == len(low["choices"]["right_norm"]) == 6
    assert sum(low["choices"]["right"]) / 6 == pytest.approx(low["choices"]["acc"][0])
    assert low["text"]["tokens"] == same["text"]["tokens"] > 16
    assert low["form"] == "decode"


def test_exact_tiers_compute_the_decided_tiers_with_any_memory(model, text):
    two = ("--policy", "dymoe", "--high-tier", "q4_k", "--low-tier", "q2_k", "--retention", "0.5")
    runs = [
        evaluate(model, "--text", str(text), *two, *memory)
        for memory in ((), ("--expert-ram", "1MiB"))
    ]
    usage = runs[0]["usage"]
    assert usage["computed_low"] == pytest.approx(usage["low"], abs=1e-9) and usage["low"] > 0.2
    assert runs[0]["text"]["perplexity"] == runs[1]["text"]["perplexity"]
    assert runs[0]["exact_tiers"]
    reused = evaluate(model, "--text", str(text), *two, "--reuse")
    assert reused["usage"]["computed_low"] < usage["computed_low"]
    assert not reused["exact_tiers"]


# --tokens is the old name, kept for scripts.
@pytest.mark.parametrize("option", ["--max-tokens", "--tokens"])
def test_the_plain_path_has_no_store_to_report(model, text, option):
    result = evaluate(model, "--text", str(text), option, "20", "--prefill")
    assert result["usage"] is None and result["form"] == "prefill"
    assert result["text"]["tokens"] == 20


ERRORS = [
    ([], "nothing to evaluate"),
    (["--text", "none.txt"], "none.txt: No such file"),
    (["--choices", "x", "--kl"], "--kl needs a text"),
    (["--text", "x", "--window", "2"], "--window must be at least 8"),
    (["--text", "x", "--max-tokens", "5", "--tokens", "9"], "--tokens is the old name of --max-to"),
]


@pytest.mark.parametrize(("args", "message"), ERRORS)
def test_errors_are_one_sentence(args, message):
    result = CliRunner().invoke(cli, ["eval", "-m", "x.gguf", *args])
    assert result.exit_code != 0
    assert message in result.stderr and "Traceback" not in result.stderr
