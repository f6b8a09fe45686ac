"""One run of a check in a process of its own: `python -m orchestrator.lab.check.child` is told a
CheckJob, and answers what it found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import peak_rss_bytes
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.errors import MoeEdgeError
from orchestrator.lab.check.budgets import CheckJob, settings_of, three_budgets
from orchestrator.lab.children import Result, answer
from orchestrator.runtime.engine import Engine

# What the experts of a layer give together, as llama.cpp's common MoE builder names it.
_EXPERTS_OUT = "ffn_moe_out-"

# Whether a model's tokenizer gives texts back, and its template renders a conversation.
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
    """Raises MoeEdgeError in one of its forms."""
    config = Config.build(**job.settings)
    if job.beside is not None:
        # Measuring leaves so many bytes of the cap to another process; the plan does not, so that
        # it is a chat's.
        with ExpertModel.open(config.model, config.low) as model:
            runs = Planner(config.with_changes(beside=job.beside), model).runs(config)
        return {"settings": settings_of(runs.config)}
    if job.budgets is not None:
        with ExpertModel.open(config.model) as model:
            runs_of = three_budgets(config, Planner(config, model), job.budgets)
            return {"budgets": [(name, settings_of(each)) for name, each in runs_of]}
    with Engine.open(config, compared=job.chosen) as engine:
        if job.layers:
            return watch_layers(engine, [*(job.prompt or ()), *(job.answer or ())], job.rows)
        found = describe(engine) | {"text": read_and_render(engine)}
        return found | play(engine, job) | counted(engine) | {"peak_rss": peak_rss_bytes()}


def describe(engine: Engine) -> Result:
    """What runs, and how much memory it may take."""
    plan, config = engine.plan, engine.config
    capped = config.vram if plan.device else config.ram
    return {
        "mode": engine.mode,
        "managed": engine.managed,
        "policy": engine.policy.name if engine.managed else None,
        "tier": plan.tier_names[0],
        # the plain path without a cap promises nothing: it maps the file, and pages may go again
        "promised_bytes": capped or (plan.total_bytes if engine.managed else None),
        "planned_bytes": plan.total_bytes,
        "n_ctx": engine.n_ctx,
    }


def read_and_render(engine: Engine) -> dict[str, Any]:
    """lost: the samples whose tokens give another text. template: whether the model has its own;
    rendered: tokens of a conversation, None where that fails. problems, notes: sentences."""
    problems: list[str] = []
    notes: list[str] = []
    lost = []
    for name, sample in SAMPLES.items():
        tokens = engine.tokenize(sample, special=False)
        back = b"".join(map(engine.llama.piece, tokens)).decode("utf-8", "replace")
        if back not in (sample, f" {sample}"):  # SentencePiece puts a space before it
            lost.append(name)
    if lost:
        problems.append(f"the tokenizer does not give these texts back: {', '.join(lost)}")
    if not engine.llama.eos():
        notes.append("the model names no end token, so that answers end at their length only")
    own = engine.llama.chat_template() is not None
    if not own:
        notes.append("the file has no chat template: ChatML takes its place in a chat")
    rendered = None
    try:
        rendered = engine.render_chat((_SYSTEM, *_DIALOGUE))
    except MoeEdgeError:
        try:
            rendered = engine.render_chat(_DIALOGUE)
            notes.append("the chat template takes no system message")
        except MoeEdgeError as error:
            problems.append(str(error))
    if rendered is not None:
        # Control tokens by their names.
        pieces = (engine.llama.piece(token, special=True) for token in rendered)
        text = b"".join(pieces).decode("utf-8", "replace")
        if QUESTION not in text:
            problems.append("the chat template leaves out what the user says")
        bos = engine.llama.bos()
        if bos and text.startswith(bos + bos):
            notes.append("a rendered conversation begins with two begin tokens")
    return {
        "samples": len(SAMPLES),
        "lost": lost,
        "template": own,
        "rendered": None if rendered is None else len(rendered),
        "problems": problems,
        "notes": notes,
    }


def play(engine: Engine, job: CheckJob) -> Result:
    """Reads the prompt, then decodes; each row of logits goes to the file at once, since memory is
    measured. Speeds in tokens per second, of the median step."""
    n_decode = min(job.n_decode, engine.n_ctx // 2)
    n_prompt = engine.plan.n_ubatch if job.n_prompt is None else job.n_prompt
    prompt = job.prompt
    if not prompt:
        # A text, again and again; of a vocabulary that has none for it, the first tokens.
        n = min(n_prompt, engine.n_ctx - n_decode)
        tokens = engine.tokenize(PROSE) or list(range(engine.llama.n_vocab))
        prompt = (tokens * (1 + n // len(tokens)))[:n]
    answer: list[int] = []
    steps: list[float] = []
    with open(job.rows, "wb") as rows:
        start = perf_counter()
        logits = engine.eval(prompt, 0)
        prompt_s = perf_counter() - start
        rows.write(logits.tobytes())
        for i in range(n_decode):
            token = job.answer[i] if job.answer else int(logits[-1].argmax())
            answer.append(token)
            start = perf_counter()
            logits = engine.eval([token], len(prompt) + i)
            steps.append(perf_counter() - start)
            rows.write(logits.tobytes())
    return {
        "prompt": prompt,
        "answer": answer,
        "n_vocab": engine.llama.n_vocab,
        "prompt_tok_s": len(prompt) / prompt_s,
        "decode_tok_s": 1 / statistics.median(steps),
    }


def counted(engine: Engine) -> Result:
    """What the store and the device count."""
    if not engine.managed:
        return {}
    engine.store.check()
    stats = engine.store.stats()
    found: dict[str, Any] = {
        "hit_rate": sum(stats.hits) / max(1, sum(stats.requests)),
        "slot_bytes_peak": stats.slot_bytes_peak,
        "budget_bytes": stats.budget_bytes,
        "direct_io": bool(stats.direct_io),
    }
    if engine.plan.device:
        found["device_bytes"] = engine.device_bytes + stats.slot_bytes_peak
    return found


def watch_layers(engine: Engine, tokens: Sequence[int], path: str) -> Result:
    """Reads the tokens in one batch, and keeps what the experts of each layer give."""
    from orchestrator.lab.observe import Node, Observer

    seen: dict[str, np.ndarray] = {}

    def wanted(node: Node) -> bool:
        return node.name.startswith(_EXPERTS_OUT)

    def keep(node: Node) -> None:
        seen[node.name.removeprefix(_EXPERTS_OUT)] = node.array()

    n = min(len(tokens), engine.plan.n_ubatch)
    threads = engine.config.n_threads
    with Observer(engine.llama, n, threads, wanted, keep) as observer:
        observer.read(tokens[:n])
    np.savez(path, **seen)  # type: ignore[arg-type]
    return {"layers": sorted(map(int, seen))}


if __name__ == "__main__":
    answer(lambda told: run(CheckJob(**told)))
