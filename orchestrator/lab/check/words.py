"""Whether a model's tokenizer gives texts back, and its template renders a conversation."""

from __future__ import annotations

from typing import Any

from orchestrator.engine.engine import Engine
from orchestrator.errors import MoeEdgeError

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


def read_and_render(engine: Engine) -> dict[str, Any]:
    """lost: the samples whose tokens give another text. template: whether the model has its own;
    rendered: tokens of a conversation, None where that fails. problems, notes: sentences."""
    problems: list[str] = []
    notes: list[str] = []
    lost = [name for name, text in SAMPLES.items() if not comes_back(engine, text)]
    if lost:
        problems.append(f"the tokenizer does not give these texts back: {', '.join(lost)}")
    if not engine.llama.eos():
        notes.append("the model names no end token, so that answers end at their length only")
    own = engine.llama.chat_template() is not None
    if not own:
        notes.append("the file has no chat template: ChatML takes its place in a chat")
    rendered = None
    try:
        rendered = render_dialogue(engine, notes)
    except MoeEdgeError as error:
        problems.append(str(error))
    if rendered is not None:
        text = text_of(engine, rendered)
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


def comes_back(engine: Engine, text: str) -> bool:
    """Whether a text is the same behind its tokens; SentencePiece puts a space before it."""
    tokens = engine.tokenize(text, special=False)
    back = b"".join(map(engine.llama.piece, tokens)).decode("utf-8", "replace")
    return back in (text, f" {text}")


def render_dialogue(engine: Engine, notes: list[str]) -> list[int]:
    """Tokens of a conversation, without a system message where the template refuses one. Raises
    MoeEdgeError where it refuses that as well."""
    try:
        return engine.render_chat((_SYSTEM, *_DIALOGUE))
    except MoeEdgeError:
        rendered = engine.render_chat(_DIALOGUE)
        notes.append("the chat template takes no system message")
        return rendered


def text_of(engine: Engine, tokens: list[int]) -> str:
    """The text of tokens, control tokens by their names."""
    pieces = (engine.llama.piece(token, special=True) for token in tokens)
    return b"".join(pieces).decode("utf-8", "replace")
