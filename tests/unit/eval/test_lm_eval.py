"""moe-edge as a model of lm_eval, with local tasks."""

import json
import math

import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install -e '.[eval]'")

from answering import answered
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from orchestrator.config import Config
from orchestrator.lab.eval.harness import MoeEdgeLM
from orchestrator.lab.eval.judge import Judge, read_questions, score_choices
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.evaluator import log_softmax
from orchestrator.runtime.runtime import Runtime

SETTINGS = {"policy": "lru", "high_tier": "q4_k", "threads": 1, "ctx": 256, "expert_ram": "8MiB"}

CHOICES = """
task: local_choices
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: local_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: byte_perplexity}]
"""
ANSWERS = """
task: local_answers
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Function that writes a task and its records, and returns lm_eval's results without a
    network."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def run(model, yaml, records):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        source = f"dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {data}}}\n"
        source = source.replace(f"data_files: {data}", f'data_files: {{test: "{data}"}}')
        (tmp_path / "task.yaml").write_text(yaml + source)
        name = yaml.split()[1]
        settings = ",".join(f"{key}={value}" for key, value in SETTINGS.items())
        found = simple_evaluate(
            model="moe-edge",
            model_args=f"model={model},{settings}",
            tasks=[name],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )
        return found["results"][name] | {"samples": found["samples"][name]}

    return run


@pytest.fixture
def config(model):
    return Config.build(model=model, **SETTINGS | {"expert_ram": 8 << 20, "exact_tiers": True})


@pytest.fixture
def e(config):
    with Runtime.open(config) as runtime, runtime.evaluator() as evaluator:
        yield evaluator


def test_it_is_registered():
    assert get_model("moe-edge") is MoeEdgeLM


def test_multiple_choice_agrees_with_our_own(model, e, choices, tasks):
    records = [json.loads(line) for line in choices.read_text().splitlines()]
    found = tasks(model, CHOICES, records)
    ours = score_choices(Judge(e), read_questions(choices))
    right = [sample["acc"] for sample in sorted(found["samples"], key=lambda s: s["doc_id"])]
    assert right == ours.right.astype(float).tolist()
    assert found["acc_norm,none"] == pytest.approx(ours.acc_norm.value)


def test_contexts_are_counted_once_for_their_continuations(model):
    """Each context is counted once, however many continuations are scored after it. Afterwards it
    is part of the usual usage for the next context."""
    settings = {"policy": "context", "hot_experts": 2, "threads": 1, "ctx": 256}
    lm = MoeEdgeLM(model=model, **settings)
    with lm.runtime as runtime:
        policy, k = runtime.inside.policy, runtime.model.n_expert_used
        contexts = [lm.tok_encode(text) for text in ("The fox sat by", "A star, they said, is")]
        choices = [lm.tok_encode(text) for text in (" the river", " hot", " far away")]
        placed = []
        for context in contexts:
            lm._loglikelihood_tokens([(None, context, choice) for choice in choices])
            placed.append(runtime.inside.store.resident())
            # All tokens except the last one of the context, which is decoded. The weights of the
            # last layer are predictions.
            gates = policy.use.sums[1].sum(axis=1)[:-1]
            assert gates == pytest.approx([len(context) - 1] * len(gates), rel=1e-4)
        assert policy.updates == len(contexts)
        answered = sum(len(choice) - 1 for choice in choices)
        assert set(policy.use.past.sum(axis=1)) == {k * (len(contexts[0]) + answered)}
        assert set(policy.use.sums[0].sum(axis=1)) == {k * (len(contexts[1]) + answered)}
        assert (placed[0] != placed[1]).any()


def test_whole_texts_agree_with_our_own(model, e, tasks):
    text = "The fox sat by the river and looked at the stars. " * 2
    found = tasks(model, ROLLING, [{"text": text}])
    tokens = e.tokenize(text)
    first = e.inside.model.metadata["tokenizer.ggml.eos_token_id"]
    if e.tokenize(""):
        first, tokens = tokens[0], tokens[1:]
    rows = list(Judge(e).rows([first, *tokens]))
    nll = -sum(log_softmax(row)[token] for row, token in zip(rows, tokens, strict=True))
    assert math.log(found["byte_perplexity,none"]) == pytest.approx(nll / len(text), rel=1e-6)


def test_answers_equal_the_runtimes(model, config, tasks):
    question = "The fox sat by"
    with Runtime.open(config, answering=Answering()) as runtime:
        prompt = runtime.vocabulary.tokenize(question, add_special=True, parse_special=True)
        expected = answered(runtime, prompt, 8)["content"].split("\n")[0]
    found = tasks(model, ANSWERS, [{"question": question, "answer": expected}])
    assert found["samples"][0]["resps"][0][0] == expected
