"""Scoring after a prompt: the prompt is read in steps of many tokens, the rest is decoded, and
policies count both."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from judged import TEXT

from orchestrator.cli.main import cli
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.eval.judge import Judge, score_text
from orchestrator.lab.eval.text import Document, Window
from orchestrator.runtime.evaluator import log_softmax
from orchestrator.runtime.runtime import Runtime

POLICIES = {
    "plain": {"policy": "plain"},
    "lru": {"policy": "lru", "high_tier": "q8_0", "expert_ram": 1 << 20},
    "dymoe": {"policy": "dymoe", "high_tier": "q4_k", "low_tier": "q2_k", "retention": 0.5},
    "dynaexq": {"policy": "dynaexq", "high_tier": "q4_k", "low_tier": "q2_k", "update_steps": 4},
    "context": {"policy": "context", "hot_experts": 2},
}


def open_engine(model, **settings):
    settings = {"ctx": 256, "threads": 1, "ubatch": 64, "exact_tiers": True} | settings
    return Runtime.open(Config.build(model=model, **settings))


def windows(e, prompt):
    options = EvalOptions(window=48, prompt_tokens=prompt)
    return options.windows(e, [Document(TEXT), Document(TEXT, "Once upon")])


def nll(e, found):
    return score_text(Judge(e), found).nll


@pytest.mark.parametrize("policy", ["plain", "lru"])
def test_without_decisions_a_prompt_changes_no_score(model, policy):
    with open_engine(model, **POLICIES[policy]) as runtime, runtime.evaluator() as e:
        found = windows(e, 12)
        assert all(each.prompt and each.first >= 12 for each in found)
        forced = [Window(each.tokens, each.first, each.domain) for each in found]
        after_prompt, token_by_token = nll(e, found), nll(e, forced)
    assert len(after_prompt) > 100
    assert after_prompt == pytest.approx(token_by_token, abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_is_read_in_one_step_and_the_rest_decoded(model, policy, monkeypatch):
    with open_engine(model, **POLICIES[policy]) as runtime, runtime.evaluator() as e:
        tokens = e.tokenize(TEXT)[:20]
        own, read = e.eval, []

        def seen(tokens, pos, *args, **more):
            read.append((pos, len(tokens), more["phase"]))
            return own(tokens, pos, *args, **more)

        monkeypatch.setattr(e, "eval", seen)
        rows = list(Judge(e).rows(tokens, 12, prompt=True))
        assert len(rows) == 8
        assert read[0] == (0, 11, Phase.PREFILL)
        assert read[1:] == [(at, 1, Phase.DECODE) for at in range(11, 19)]


def test_scores_wait_for_placement_and_do_not_depend_on_the_disk(model):
    found = []
    for rate in (0, 2 << 20):
        with (
            open_engine(model, **POLICIES["context"], transition_rate=rate) as runtime,
            runtime.evaluator() as e,
        ):
            asked = windows(e, 12)
            judge = Judge(e)
            rows = judge.rows(asked[0].tokens, asked[0].first, prompt=True)
            next(rows)
            resident, target = e.inside.store.states()
            assert (resident == target).all() and e.inside.policy.updates == 1
            rest = list(rows)
            assert len(rest) == asked[0].n_scored - 1
            assert (e.inside.store.states()[0] == resident).all()
            found.append(nll(e, asked))
            assert e.inside.policy.updates == 1 + len(asked)
    assert (found[0] == found[1]).all()


def test_contexts_of_questions_are_prompts(model):
    with open_engine(model, **POLICIES["context"]) as runtime, runtime.evaluator() as e:
        context, choice = e.tokenize(TEXT)[:20], e.tokenize(" the river")
        logp, _ = Judge(e).continuation(context, choice)
        assert e.inside.policy.updates == 1
        assert_counted(e, [(context, choice)])
    with open_engine(model, **POLICIES["context"]) as runtime, runtime.evaluator() as e:
        rows = np.stack(list(Judge(e).rows([*context, *choice], 20, prompt=True)))
    expected = log_softmax(rows)[np.arange(len(choice)), choice]
    assert logp == pytest.approx(expected, abs=1e-9)


def assert_counted(e, asked):
    """Assert the policy's counts for these (context, continuation) pairs.

    Earlier contexts and continuations are in the sum of past sequences, the latest in the running
    sequence. The last token of a continuation is not counted. Only prompt tokens have gate weights.
    """
    use, k = e.inside.policy.use, e.inside.model.n_expert_used
    *before, (context, after_prompt) = [(len(c), len(t) - 1) for c, t in asked]
    assert (use.past.sum(axis=1) == k * sum(map(sum, before))).all()
    assert (use.sums[0].sum(axis=1) == k * (context + after_prompt)).all()
    # The first token of an answer is the last token of its context, which is decoded. The weights
    # of the last layer are predictions.
    gates = use.sums[1].sum(axis=1)[:-1]
    assert gates == pytest.approx(np.full(len(gates), context - 1), rel=1e-4)


def test_the_command_scores_tokens_after_the_prompts(model, text):
    options = ["-m", str(model), "--threads", "1", "--window", "32", "--text", str(text)]
    options += ["--policy", "lru", "--high-tier", "q8_0"]
    counts = []
    for prompt in ([], ["--prompt-tokens", "8"]):
        result = CliRunner().invoke(cli, ["eval", *options, *prompt, "--json"])
        assert result.exit_code == 0, result.output
        counts.append(json.loads(result.stdout)["text"]["tokens"])
    assert counts[0] - counts[1] in range(7, 7 * 20) and counts[1] > 16
    result = CliRunner().invoke(cli, ["eval", *options, "--prompt-tokens", "8"])
    assert "begins with a prompt of at least 8 tokens" in result.stdout


def test_prompts_without_tokens_to_score_are_refused(tmp_path):
    for options, message in (
        ({"window": 64, "prompt_tokens": 64}, "--prompt-tokens 64 must be smaller"),
        ({"prefill": True, "prompt_tokens": 0}, "remove --prompt-tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            EvalOptions(text=tmp_path / "t", **options).check()
