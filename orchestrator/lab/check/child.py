"""One run of a check in a child process.

`python -m orchestrator.lab.check.child` receives a CheckJob and returns its result.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import peak_rss_bytes
from orchestrator.cost.planner import Planner
from orchestrator.errors import MoeEdgeError
from orchestrator.lab.check.budgets import CheckJob, settings_of, three_budgets
from orchestrator.lab.children import Result, answer
from orchestrator.native import context_memory
from orchestrator.native.llama import Bindings
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.evaluator import Evaluator, Inside
from orchestrator.runtime.runtime import Runtime

# Prefix of the name of the tensor that has the summed expert outputs of a layer, in llama.cpp's
# graphs.
_EXPERTS_OUT = "ffn_moe_out-"

# Texts that the tokenizer must reproduce, and a conversation that the template must render.
PROSE = (
    "The experts of a model lie on disk, and a few of them are in memory. A router asks for those "
    "that it needs for the next word; what is not there is read, while the others compute.\n"
)
SAMPLES = {
    "prose": PROSE,
    "numbers": "In 1987 they paid 12,345.67 for 3 x 4 pieces (100 %).",
    "code": 'def f(x):\n    return {"a": x[0] ** 2}  # \t<b>&amp;</b>\n',
    "other scripts": "Grüße, naïve café; Ελληνικά, русский, 日本語, العربية.",
    "symbols": "🦊 → ½ ∑ ≤ “quoted” …",
    "spaces": "a  b   c\n\n\n  d\t\te",
}
QUESTION = "What is the capital of Norway?"
_DIALOGUE = (
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello. What would you like to know?"},
    {"role": "user", "content": QUESTION},
)
_SYSTEM = {"role": "system", "content": "Be brief."}


def run(job: CheckJob) -> Result:
    """Perform a job of `moe-edge check` in this process, and return its result.

    Raises MoeEdgeError if the model or the settings cannot be used.
    """
    request = job.request()
    config = request.config
    if job.other_bytes is not None:
        # While speeds are measured, these bytes of the cap belong to the other process. The plan
        # uses the whole cap, so that it equals a chat's plan.
        less = config.with_changes(ram=config.ram and max(1, config.ram - job.other_bytes))
        with ExpertModel.open(config.model, config.low) as model:
            runs = Planner(replace(request, config=less), model).runs(config)
        return {"settings": settings_of(runs.config)}
    if job.budgets is not None:
        with ExpertModel.open(config.model) as model:
            runs_of = three_budgets(config, Planner(request, model), job.budgets)
            return {"budgets": [(name, settings_of(each)) for name, each in runs_of]}
    answering = Answering(reads_ahead=False) if job.answers else None
    with Runtime.open(request, answering=answering, ignore_unused=job.chosen) as runtime:
        found = {"text": read_and_render(runtime)} if job.answers else {}
        with runtime.evaluator() as evaluator:
            inside = evaluator.inside
            if job.layers:
                return watch_layers(inside, [*(job.prompt or ()), *(job.answer or ())], job.rows)
            found |= describe(evaluator) | {"mode": runtime.mode}
            return found | play(evaluator, job) | counted(inside) | {"peak_rss": peak_rss_bytes()}


def describe(evaluator: Evaluator) -> Result:
    """Return a dict with the policy, the precision and the memory of a loaded model.

    The keys are "managed" (whether our engine supplies the experts), "policy", "tier" (the
    precision), "promised_bytes" (the memory limit), "planned_bytes" and "n_ctx".
    """
    plan, config, inside = evaluator.plan, evaluator.config, evaluator.inside
    capped = config.vram if plan.device else config.ram
    return {
        "managed": inside.managed,
        "policy": inside.policy.name if inside.managed else None,
        "tier": plan.tier_names[0],
        # Without a cap, `--policy plain` has no limit, because the resident pages of its mapped
        # file vary.
        "promised_bytes": capped or (plan.total_bytes if inside.managed else None),
        "planned_bytes": plan.total_bytes,
        "n_ctx": evaluator.n_ctx,
    }


def read_and_render(runtime: Runtime) -> dict[str, Any]:
    """Check the tokenizer and the chat template of a loaded model. Returns a dict.

    - samples, lost: number of sample texts, and names of those that do not survive tokenization.
    - template: whether the file has a chat template.
    - rendered: token count of a rendered conversation; None if the template fails.
    - problems, notes: sentences for the report.
    """
    vocabulary = runtime.vocabulary
    problems: list[str] = []
    notes: list[str] = []
    lost = []
    for name, sample in SAMPLES.items():
        tokens = vocabulary.tokenize(sample, add_special=False, parse_special=False)
        back = b"".join(map(vocabulary.piece, tokens)).decode("utf-8", "replace")
        if back not in (sample, f" {sample}"):  # SentencePiece puts a space before a text
            lost.append(name)
    if lost:
        problems.append(
            f"the tokenizer does not encode and decode these texts without a change: "
            f"{', '.join(lost)}"
        )
    if not vocabulary.eos():
        notes.append("the model has no end token, so answers end only at their maximum length")
    own = "tokenizer.chat_template" in runtime.model.metadata
    if not own:
        notes.append("the file has no chat template: a chat uses ChatML instead")
    rendered = None
    try:
        rendered = render(runtime, (_SYSTEM, *_DIALOGUE))
    except MoeEdgeError:
        try:
            rendered = render(runtime, _DIALOGUE)
            notes.append("the chat template does not accept a system message")
        except MoeEdgeError as error:
            problems.append(str(error))
    if rendered is not None:
        # Control tokens are shown by their names.
        pieces = (vocabulary.piece(token, special=True) for token in rendered)
        text = b"".join(pieces).decode("utf-8", "replace")
        if QUESTION not in text:
            problems.append("the chat template drops the user's message")
        bos = vocabulary.bos()
        if bos and text.startswith(bos + bos):
            notes.append("a rendered conversation begins with two BOS tokens")
    return {
        "samples": len(SAMPLES),
        "lost": lost,
        "template": own,
        "rendered": None if rendered is None else len(rendered),
        "problems": problems,
        "notes": notes,
    }


def render(runtime: Runtime, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Render a conversation with the model's chat template, and return its tokens.

    Raises MoeEdgeError if the chat template fails.
    """

    def ask(route: str, **body: Any) -> Any:
        status, text = runtime.query(route, json.dumps(body).encode()).whole()
        found = json.loads(text)
        if status != 200:
            raise MoeEdgeError(f"the model's chat template failed: {found['error']['message']}")
        return found

    prompt = ask("/apply-template", messages=messages)["prompt"]
    return list(ask("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"])


def play(evaluator: Evaluator, job: CheckJob) -> Result:
    """Run a check job: read its prompt, decode an answer, and write the logits to job.rows.

    The logits of each step are written to this file at once, so that they do not add to the
    measured memory. Returns a dict with the tokens, the size of the vocabulary, and two speeds in
    tokens per second. "prompt_tok_s" is the speed of reading the prompt. "decode_tok_s" is the
    speed of the median decode step.
    """
    n_decode = min(job.n_decode, evaluator.n_ctx // 2)
    n_prompt = evaluator.plan.n_ubatch if job.n_prompt is None else job.n_prompt
    prompt = job.prompt
    if not prompt:
        # Repeat a built-in text. If the vocabulary cannot encode it, repeat all tokens of the
        # vocabulary.
        n = min(n_prompt, evaluator.n_ctx - n_decode)
        tokens = evaluator.tokenize(PROSE) or list(range(evaluator.inside.llama.n_vocab))
        prompt = (tokens * (1 + n // len(tokens)))[:n]
    answer: list[int] = []
    steps: list[float] = []
    with open(job.rows, "wb") as rows:
        start = perf_counter()
        logits = evaluator.eval(prompt, 0)
        prompt_s = perf_counter() - start
        rows.write(logits.tobytes())
        for i in range(n_decode):
            token = job.answer[i] if job.answer else int(logits[-1].argmax())
            answer.append(token)
            start = perf_counter()
            logits = evaluator.eval([token], len(prompt) + i)
            steps.append(perf_counter() - start)
            rows.write(logits.tobytes())
    return {
        "prompt": prompt,
        "answer": answer,
        "n_vocab": evaluator.inside.llama.n_vocab,
        "prompt_tok_s": len(prompt) / prompt_s,
        "decode_tok_s": 1 / statistics.median(steps),
    }


def counted(inside: Inside) -> Result:
    """Return statistics of a model's expert cache, such as its hit rate and its memory use.

    Returns {} if llama.cpp runs the model without our expert cache.

    - inside: the parts of the loaded model.
    """
    if not inside.managed:
        return {}
    inside.store.check()
    stats = inside.store.stats()
    found: dict[str, Any] = {
        "hit_rate": sum(stats.hits) / max(1, sum(stats.requests)),
        "slot_bytes_peak": stats.slot_bytes_peak,
        "budget_bytes": stats.budget_bytes,
        "direct_io": bool(stats.direct_io),
    }
    if inside.plan.device:
        llama = context_memory(Bindings.load().library(), inside.context.handle)[1]
        found["device_bytes"] = llama + stats.slot_bytes_peak
    return found


def watch_layers(inside: Inside, tokens: Sequence[int], path: str) -> Result:
    """Read the tokens in one batch, and write the experts' output of each layer to a file.

    Tokens that do not fit in a micro-batch are left out.

    The file `path` (.npz) has the summed outputs of the chosen experts, by layer number.
    """
    from orchestrator.lab.observe import Node, Observer

    seen: dict[str, np.ndarray] = {}

    def wanted(node: Node) -> bool:
        return node.name.startswith(_EXPERTS_OUT)

    def keep(node: Node) -> None:
        seen[node.name.removeprefix(_EXPERTS_OUT)] = node.array()

    n = min(len(tokens), inside.plan.n_ubatch)
    threads = inside.config.n_threads
    with Observer(inside.llama, n, threads, wanted, keep) as observer:
        observer.read(tokens[:n])
    np.savez(path, **seen)  # type: ignore[arg-type]
    return {"layers": sorted(map(int, seen))}


if __name__ == "__main__":
    answer(lambda fields: run(CheckJob(**fields)))
