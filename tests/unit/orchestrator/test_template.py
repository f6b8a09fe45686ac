"""Chat templates: the model's own, the fallback, and broken ones."""

from __future__ import annotations

import pytest

from orchestrator.engine.texts import ChatTemplate
from orchestrator.errors import MoeEdgeError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ x }}"}]


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


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{{ {'a': 'é', 'b': [1]} | tojson }} {{ messages | tojson(indent=2) }}",
        "{{ tools is none }} {{ functions is none }} {{ strftime_now('%Y') }}",
        "{% if true %}\n  text\n{% endif %}\nrest {{ missing }}",
    ],
)
def test_templates_read_as_upstreams_bindings_read_them(source: str) -> None:
    upstream = pytest.importorskip("llama_cpp.llama_chat_format", exc_type=Exception)
    theirs = upstream.Jinja2ChatFormatter(source, eos_token="</s>", bos_token="<s>")
    assert ChatTemplate(source, "<s>", "</s>").render(MESSAGES) == theirs(messages=MESSAGES).prompt
