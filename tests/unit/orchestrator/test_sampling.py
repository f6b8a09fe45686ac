"""Where an answer ends, how settings of sampling are written, and chat templates."""

import pytest
from orchestrator.runtime.texts import ChatTemplate, StopTexts
from tables import cases

from orchestrator.config import Config, Sampling
from orchestrator.errors import MoeEdgeError, SettingError


def streamed(pieces, *stop):
    texts = StopTexts(stop)
    shown = []
    for piece in pieces:
        shown.append(texts.feed(piece))
        if texts.found:
            return shown, True
    return [*shown, texts.rest()], False


@cases(
    "pieces, stop, shown, found",
    (["one two"], [], "one two", False),
    (["one STOP two"], ["STOP"], "one ", True),
    (["one S", "TO", "P two"], ["STOP"], "one ", True),
    (["one ST", "AR"], ["STOP"], "one STAR", False),
    (["one ST"], ["STOP"], "one ST", False),
    (["SSTOP"], ["STOP"], "S", True),
    (["abab", "c"], ["ababc"], "", True),
    (["a b c"], ["c", "b"], "a ", True),
    (["x\n", "\ny"], ["\n\n"], "x", True),
)
def test_a_stop_text_ends_an_answer(pieces, stop, shown, found):
    said, ended = streamed(pieces, *stop)
    assert ("".join(said), ended) == (shown, found)
    # The same letter by letter.
    said, ended = streamed(list("".join(pieces)), *stop)
    assert ("".join(said), ended) == (shown, found)


def test_only_what_may_begin_a_stop_text_is_held_back():
    assert streamed(["one ", "ST", "AR", "T"], "STOP")[0] == ["one ", "", "STAR", "T", ""]


def test_a_config_has_the_settings_of_sampling():
    config = Config.build(model="m", temp=0.5, top_k=3, min_p=0.1, stop=("a", "b"))
    assert config.sampling == Sampling(temp=0.5, top_k=3, min_p=0.1, stop=("a", "b"))
    assert set(Sampling.declared()) <= set(Config.declared())


def test_texts_are_read_as_a_shell_reads_them():
    stop = Sampling.declared()["stop"]
    assert stop.parse("'the end' User:") == ("the end", "User:")
    assert stop.parse("-") == ()
    for wrong in ("'a", "''"):
        with pytest.raises(SettingError):
            stop.parse(wrong)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ x }}"}]


def test_a_models_own_template_and_the_fallback_chatml():
    assert ChatTemplate(None, "", "").render(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ x }}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    text = ChatTemplate(source, "<s>", "</s>").render(MESSAGES[1:])
    assert text == "<s>[user] Hi {{ x }}</s>[a]"


@cases(
    "source", "{% if %}", "{{ raise_exception('no system prompt') }}", "{{ messages[9].role.x }}"
)
def test_broken_templates_are_one_error(source):
    with pytest.raises(MoeEdgeError, match="chat template failed"):
        ChatTemplate(source, "", "").render(MESSAGES)


@cases(
    "source",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ {'a': 'é', 'b': [1]} | tojson }} {{ messages | tojson(indent=2) }}",
    "{{ tools is none }} {{ functions is none }} {{ strftime_now('%Y') }}",
    "{% if true %}\n  text\n{% endif %}\nrest {{ missing }}",
)
def test_templates_read_as_upstreams_bindings_read_them(source):
    upstream = pytest.importorskip("llama_cpp.llama_chat_format", exc_type=Exception)
    theirs = upstream.Jinja2ChatFormatter(source, eos_token="</s>", bos_token="<s>")
    assert ChatTemplate(source, "<s>", "</s>").render(MESSAGES) == theirs(messages=MESSAGES).prompt
