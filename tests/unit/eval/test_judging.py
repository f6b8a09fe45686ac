"""Judging with the real engine, on a random-weight model of a few megabytes: by decoding, behind a
prompt, and by the distance from another precision."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from judged import TEXT

from orchestrator.cli.main import cli
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.engine.texts import log_softmax
from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.events import Phase
from orchestrator.lab.eval import EvalOptions, evaluate
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.perplexity import score_text
from orchestrator.lab.eval.text import Document, Window, cut_windows


def open_engine(model, policy="lru", **settings):
    settings = {"ctx": 256, "threads": 1, "ubatch": 64} | POLICIES[policy] | settings
    return Engine.open(Config.build(model=model, policy=policy, **settings))


def evaluated(model, *args):
    options = ["-m", str(model), "--threads", "1", "--ctx", "256", "--window", "64", "--json"]
    result = CliRunner().invoke(cli, ["eval", *options, *args])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_rows_are_the_engines_logits(model):
    with open_engine(model, logits_all=True) as engine:
        tokens = engine.tokenize("The fox sat by the river and looked.")
        rows = np.stack([row.copy() for row in Judge(engine).rows(tokens)])
        whole = np.stack(list(Judge(engine, prefill=True).rows(tokens)))
        expected = np.stack(
            [engine.eval([t], i, phase=Phase.DECODE)[-1] for i, t in enumerate(tokens[:-1])]
        )
    assert np.array_equal(rows, expected)
    assert rows.shape == whole.shape
    assert np.corrcoef(rows.ravel(), whole.ravel())[0, 1] > 0.999


def test_rows_of_a_prompt_stay_where_they_are(model):
    """A copy of a window's logits is hundreds of MiB where the vocabulary is large."""
    with open_engine(model, logits_all=True) as engine:
        tokens = engine.tokenize("The fox sat by the river and looked. " * 10)[:101]
        rows = Judge(engine, prefill=True).rows(tokens, 3)
        row = next(rows)
        assert np.shares_memory(row, engine.context.logits(64))
        found = np.stack([row.copy(), *(row.copy() for row in rows)])
        parts = [part.copy() for part in engine.eval_each(tokens[:-1], 0, Phase.PREFILL)]
    assert [len(part) for part in parts] == [64, 36]
    assert np.array_equal(found, np.concatenate(parts)[2:])


def test_a_known_beginning_is_not_read_again(model, monkeypatch):
    with open_engine(model, logits_all=True) as engine:
        one = engine.tokenize("The fox sat by the river and looked.")
        two = one[:5] + one[2:6]
        expected = [np.stack(list(Judge(engine).rows(t, 4))) for t in (one, two)]
        assert np.array_equal(expected[0], np.stack(list(Judge(engine).rows(one)))[3:])
        judge, read = Judge(engine), []
        own = engine.eval
        monkeypatch.setattr(engine, "eval", lambda *a, **k: read.append(a[1]) or own(*a, **k))
        found = [np.stack(list(judge.rows(t, 4))) for t in (one, two)]
        assert read == [*range(len(one) - 1), *range(3, len(two) - 1)]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        judge.continuation(one, two)
        assert np.array_equal(np.stack(list(judge.rows(two, 4))), expected[1])


@pytest.mark.parametrize("prefill", [False, True])
def test_a_continuation_is_scored_by_the_rows_before_it(model, prefill):
    with open_engine(model, logits_all=True) as engine:
        context = engine.tokenize("The fox sat by")
        choices = [engine.tokenize(text) for text in (" the river", " a", " the river")]
        judge = Judge(engine, prefill)
        found = [judge.continuation(context, choice) for choice in choices]
        for choice, (logp, greedy) in zip(choices, found, strict=True):
            rows = np.stack(list(Judge(engine, prefill).rows([*context, *choice])))
            expected = log_softmax(rows[len(context) - 1 :])
            assert np.array_equal(logp, expected[np.arange(len(choice)), choice])
            assert greedy == (expected.argmax(axis=1) == choice).all()
        judge.continuation(context, choices[0])
        engine.eval(context[::-1], 0)
        judge.forget()
        assert np.array_equal(judge.continuation(context, choices[0])[0], found[0][0])


def test_too_long_a_context_loses_its_oldest_tokens(model):
    with open_engine(model, logits_all=True) as engine:
        context = engine.tokenize("one two three four five six seven eight " * 40)
        choice = context[:4]
        assert len(context) > engine.n_ctx
        kept = context[-(engine.n_ctx - len(choice)) :]
        long, short = Judge(engine).continuation(context, choice), Judge(engine)
        assert np.array_equal(long[0], short.continuation(kept, choice)[0])


def test_the_best_tier_is_no_distance_from_itself_and_a_low_one_is(model, text, choices):
    same = evaluated(model, "--text", str(text), "--kl", "--policy", "lru", "--high-tier", "q8_0")
    assert same["text"]["kl"][0] == pytest.approx(0, abs=1e-6)
    assert same["text"]["top1"][0] == 1
    args = ("--text", str(text), "--choices", str(choices), "--kl")
    low = evaluated(model, *args, "--policy", "lru", "--high-tier", "q2_k")
    assert low["text"]["kl"][0] > 1e-4
    assert low["choices"]["questions"] == len(low["choices"]["right_norm"]) == 6
    assert sum(low["choices"]["right"]) / 6 == pytest.approx(low["choices"]["acc"][0])
    assert low["text"]["tokens"] == same["text"]["tokens"] > 16
    assert low["form"] == "decode" and low["prefill_perplexity"][0] > 1


def test_exact_tiers_compute_what_was_decided_whatever_the_memory(model, text):
    two = ("--policy", "dymoe", "--high-tier", "q4_k", "--low-tier", "q2_k", "--retention", "0.5")
    runs = [
        evaluated(model, "--text", str(text), *two, *memory)
        for memory in ((), ("--expert-ram", "1MiB"))
    ]
    usage = runs[0]["usage"]
    assert usage["computed_low"] == pytest.approx(usage["low"], abs=1e-9) and usage["low"] > 0.2
    assert runs[0]["text"]["perplexity"] == runs[1]["text"]["perplexity"]
    assert runs[0]["exact_tiers"]
    reused = evaluated(model, "--text", str(text), *two, "--reuse")
    assert reused["usage"]["computed_low"] < usage["computed_low"]
    assert not reused["exact_tiers"]


# The second one is what it was called, for scripts.
@pytest.mark.parametrize("option", ["--max-tokens", "--tokens"])
def test_the_plain_path_has_no_store_to_report(model, text, option):
    result = evaluated(model, "--text", str(text), option, "20", "--prefill")
    assert result["usage"] is None and result["form"] == "prefill"
    assert result["text"]["tokens"] == 20 and "prefill_perplexity" not in result


ERRORS = [
    ([], "nothing to judge on"),
    (["--text", "none.txt"], "none.txt cannot be read"),
    (["--choices", "x", "--kl"], "--kl compares on a text"),
    (["--text", "x", "--window", "2"], "--window must be 8 or more"),
    (["--text", "x", "--max-tokens", "5", "--tokens", "9"], "--tokens is another name of --max-to"),
    (["--text", "x", "--out", "d"], "--out is where a study writes"),
    (["--text", "x", "--study", "nonsense", "--out", "d"], "unknown study 'nonsense'; known: acc"),
    (["--text", "x", "--study", "depth"], "give --out DIR"),
    (["--text", "x", "--uniform", "q3_k"], "are for --study memory and equal"),
]


@pytest.mark.parametrize(("args", "message"), ERRORS)
def test_errors_are_one_sentence(args, message):
    result = CliRunner().invoke(cli, ["eval", "-m", "x.gguf", *args])
    assert result.exit_code != 0
    assert message in result.stderr and "Traceback" not in result.stderr


POLICIES = {
    "plain": {},
    "lru": {"high_tier": "q8_0", "expert_ram": 1 << 20},
    "dymoe": {"high_tier": "q4_k", "low_tier": "q2_k", "retention": 0.5},
    "dynaexq": {"high_tier": "q4_k", "low_tier": "q2_k", "update_steps": 4},
    "context": {"hot_experts": 2},
}


def windows(engine, prompt):
    return cut_windows(engine, [Document(TEXT), Document(TEXT, "Once upon")], 48, None, "t", prompt)


def nll(engine, found):
    return score_text(Judge(engine), found).nll


@pytest.mark.parametrize("policy", ["plain", "lru"])
def test_where_nothing_is_decided_a_prompt_changes_no_score(model, policy):
    with open_engine(model, policy, exact_tiers=True) as engine:
        found = windows(engine, 12)
        assert all(each.prompt and each.first >= 12 for each in found)
        forced = [Window(each.tokens, each.first, each.domain) for each in found]
        behind, token_by_token = nll(engine, found), nll(engine, forced)
    assert len(behind) > 100
    assert behind == pytest.approx(token_by_token, abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_is_read_at_once_and_the_rest_decoded(model, policy, monkeypatch):
    with open_engine(model, policy, exact_tiers=True) as engine:
        tokens = engine.tokenize(TEXT)[:20]
        own, read = engine.eval, []

        def seen(tokens, pos, *args, **more):
            read.append((pos, len(tokens), more["phase"]))
            return own(tokens, pos, *args, **more)

        monkeypatch.setattr(engine, "eval", seen)
        rows = list(Judge(engine).rows(tokens, 12, prompt=True))
        assert len(rows) == 8
        assert read[0] == (0, 11, Phase.PREFILL)
        assert read[1:] == [(at, 1, Phase.DECODE) for at in range(11, 19)]


def test_what_is_scored_is_placed_and_no_figure_depends_on_the_disk(model):
    found = []
    for rate in (0, 2 << 20):
        with open_engine(model, "context", exact_tiers=True, transition_rate=rate) as engine:
            asked = windows(engine, 12)
            judge = Judge(engine)
            rows = judge.rows(asked[0].tokens, asked[0].first, prompt=True)
            next(rows)
            resident, target = engine.store.states()
            assert (resident == target).all() and engine.policy.updates == 1
            rest = list(rows)
            assert len(rest) == asked[0].n_scored - 1
            assert (engine.store.states()[0] == resident).all()
            found.append(nll(engine, asked))
            assert engine.policy.updates == 1 + len(asked)
    assert (found[0] == found[1]).all()


def test_contexts_of_questions_are_prompts(model):
    with open_engine(model, "context", exact_tiers=True) as engine:
        context, choice = engine.tokenize(TEXT)[:20], engine.tokenize(" the river")
        logp, _ = Judge(engine).continuation(context, choice)
        assert engine.policy.updates == 1
        assert_counted(engine, [(context, choice)])
    with open_engine(model, "context", exact_tiers=True) as engine:
        rows = np.stack(list(Judge(engine).rows([*context, *choice], 20, prompt=True)))
    expected = log_softmax(rows)[np.arange(len(choice)), choice]
    assert logp == pytest.approx(expected, abs=1e-9)


def assert_counted(engine, asked):
    """What the policy knows is what these contexts, each with its continuations' tokens but the
    last, used: of the latest one as a sequence that is in memory, its prompt with routing
    weights."""
    use, k = engine.policy.use, engine.model.n_expert_used
    *before, (context, behind) = [(len(c), len(t) - 1) for c, t in asked]
    assert (use.past.sum(axis=1) == k * sum(map(sum, before))).all()
    assert (use.sums[0].sum(axis=1) == k * (context + behind)).all()
    # An answer's first token is the last one of its context, which is decoded; weights of the last
    # layer are predictions.
    gates = use.sums[1].sum(axis=1)[:-1]
    assert gates == pytest.approx(np.full(len(gates), context - 1), rel=1e-4)


def test_the_command_scores_what_is_behind_the_prompts(model, text):
    options = ["--window", "32", "--text", str(text), "--policy", "lru", "--high-tier", "q8_0"]
    counts = [
        evaluated(model, *options, *prompt)["text"]["tokens"]
        for prompt in ([], ["--prompt-tokens", "8"])
    ]
    assert counts[0] - counts[1] in range(7, 7 * 20) and counts[1] > 16
    result = CliRunner().invoke(cli, ["eval", "-m", str(model), *options, "--prompt-tokens", "8"])
    assert "behind prompts of 8 tokens or more" in result.stdout


def test_prompts_that_leave_nothing(tmp_path):
    for options, message in (
        ({"window": 64, "prompt_tokens": 64}, "--prompt-tokens 64 leaves nothing"),
        ({"prefill": True, "prompt_tokens": 0}, "leave out --prompt-tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            EvalOptions(text=tmp_path / "t", **options).check()


def asked(model, folder, kl_from=None, **settings):
    """An evaluation of a short text, with its distance from another precision."""
    text = folder / "text.txt"
    text.write_text("some words of a text, " * 20)
    usual: dict[str, Any] = {"ctx": 128, "threads": 1, "policy": "lru", "expert_ram": 2**22}
    config = Config.build(model=model, **usual, **settings)
    return config, EvalOptions(text=text, tokens=40, window=32, kl=True, kl_from=kl_from)


@pytest.mark.parametrize(("kv", "least", "most"), [("f16", -1e-7, 1e-7), ("q8_0", 1e-6, 0.05)])
def test_the_distance_is_from_16_bits(model, tmp_path, kv, least, most):
    config, options = asked(model, tmp_path, kv=kv, high_tier="q8_0")
    result = evaluate(config, options, lambda _what, _share: None)
    assert least <= result["text"]["kl"][0] <= most
    assert (" in q8_0" in result["mode"]) == (kv == "q8_0")


@pytest.mark.parametrize(
    ("high", "kl_from", "least", "most"),
    [("q4_k", "q4_k", -1e-7, 1e-7), ("q4_k", None, 1e-6, 0.5), ("q8_0", "Q4_K", 1e-6, 0.5)],
)
def test_the_distance_is_from_the_tier_that_is_named(model, tmp_path, high, kl_from, least, most):
    config, options = asked(model, tmp_path, kl_from, high_tier=high)
    result = evaluate(config, options, lambda _what, _share: None)["text"]
    assert least <= result["kl"][0] <= most
    assert result["best_tier"] == (kl_from or "q8_0").lower()
    with pytest.raises(ConfigError, match="--kl-from says what --kl counts from"):
        evaluate(config, replace(options, kl=False, kl_from="q4_k"), lambda _what, _share: None)
    with pytest.raises(MoeEdgeError, match="tier q3_k is missing; it holds q8_0, q4_k, q2_k"):
        evaluate(config, replace(options, kl_from="q3_k"), lambda _what, _share: None)
