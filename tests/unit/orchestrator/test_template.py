"""Chat templates: the model's own, the fallback, and broken ones."""

from __future__ import annotations

import pytest

from orchestrator.engine.texts import ChatTemplate
from orchestrator.errors import MoeEdgeError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ x }}"}]


@pytest.fixture(autouse=True)
def _bindings() -> None:
    pytest.importorskip("llama_cpp.llama_chat_format", exc_type=Exception)


def test_fallback_is_chatml() -> None:
    assert ChatTemplate(None, "", "").render(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ x }}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_models_own() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    text = ChatTemplate(source, "<s>", "</s>").render(MESSAGES[1:])
    assert text == "<s>[user] Hi {{ x }}</s>[a]"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ raise_exception('no system prompt') }}", "{{ messages[9].role.x }}"]
)
def test_broken_templates_are_one_error(source: str) -> None:
    with pytest.raises(MoeEdgeError, match="chat template failed"):
        ChatTemplate(source, "", "").render(MESSAGES)
