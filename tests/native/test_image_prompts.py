"""Conversations with images: reuse of prompts, cancels, and refusals."""

import base64
import io
import json

import pytest
from command_line import python
from image_models import FAMILIES
from PIL import Image

from orchestrator.errors import ConfigError, MoeEdgeError

from .servers import posted, whole
from .test_images import CHAT, answer_to, counts, model, models, part

__all__ = ["model", "models"]  # fixtures

# Llama 4's chunks of attention cannot be cut, and its answers are no valid text here.
CONTINUED = [name for name in FAMILIES if name != "llama4"]


def says(role, *content):
    text = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": role, "content": text}


def ask(runtime, *messages, n=8):
    """Return (answer, tokens of the prompt, tokens of it that were not read again)."""
    body = answer_to(runtime, list(messages), max_tokens=n, cache_prompt=True)
    n_reused, n_read = counts(body)
    return body["choices"][0]["message"]["content"], n_reused + n_read, n_reused


def drawn(color, width=64, height=64):
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


FIRST = says("user", part("wide.png"), "What is in this picture? Answer in one word, please.")
REPLY = says("assistant", "noise")
NEXT = says("user", "And in this one?", part("square.jpg"))


@pytest.mark.parametrize("family", CONTINUED)
def test_a_conversation_reads_no_image_again(models, family, tmp_path):
    """Neither in the next turn, nor after a restart with --prompt-cache."""
    settings = {"prompt_cache": tmp_path, "ctx": 512, "cache_ram": None}
    with models(family).serving(**settings) as runtime:
        _, first, _ = ask(runtime, FIRST, n=1)
        _, second, cached = ask(runtime, FIRST, REPLY, NEXT)
        assert first - 2 <= cached < second
        again = ask(runtime, FIRST, REPLY, NEXT)
    with models(family).serving(**settings) as runtime:
        assert ask(runtime, FIRST, REPLY, NEXT) == again
    assert again[2] >= first - 2


def test_an_image_of_the_same_size_is_read(model, tmp_path):
    """In memory and in a file, an image is recognised by its content."""
    question = "What is it? " * 4
    settings = {"prompt_cache": tmp_path}
    with model.serving(**settings) as runtime:
        before = [ask(runtime, says("user", drawn(color), question)) for color in ("red", "blue")]
        assert before[1][2] < 20 < before[1][1]
    with model.serving(**settings) as runtime:
        after = [ask(runtime, says("user", drawn(color), question)) for color in ("blue", "red")]
    assert [each[0] for each in after] == [before[1][0], before[0][0]]


@pytest.mark.parametrize("at", [0.0, 0.02, 0.2, 0.5])
def test_a_cancel_during_an_image_keeps_the_conversation(models, at):
    """The cancel comes while the image is decoded, scaled, encoded or computed."""
    large = says("user", REPLY["content"][0]["text"], drawn("green", 900, 900), "and this?")
    with models("qwen3-vl-moe").serving(ctx=2048) as runtime:
        _, first, _ = ask(runtime, FIRST, n=1)
        whole_answer = ask(runtime, FIRST, REPLY, NEXT)[0]
        ask(runtime, FIRST, n=1)
        asked = {"messages": [FIRST, REPLY, large], "max_tokens": 4, "stream": True}
        answer = posted(runtime, CHAT, **asked)
        answer.wait(at)
        answer.cancel()
        whole(answer)
        text, _, cached = ask(runtime, FIRST, REPLY, NEXT)
    assert text == whole_answer
    assert cached >= first - 2


def test_what_is_refused_before_the_model_loads(models, tmp_path):
    """One sentence that names the file or the option."""
    gemma, qwen = models("gemma4"), models("qwen3-vl-moe")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gemma.mmproj.read_bytes()[:-100])
    cases = {
        "belongs to another model": {"mmproj": qwen.mmproj},
        "not an image encoder": {"mmproj": gemma.path},
        "extend past the end of the file": {"mmproj": cut},
        "No such file": {"mmproj": tmp_path / "none.gguf"},
        "--ubatch 32 is too small for images": {"ubatch": 32},
    }
    for sentence, settings in cases.items():
        with pytest.raises(MoeEdgeError, match=sentence) as refused, gemma.serving(**settings):
            pass
        assert "\n" not in str(refused.value)


def test_an_encoder_beside_the_model_is_found(models):
    qwen = models("qwen3-vl-moe")
    with qwen.serving(mmproj=None) as runtime:
        assert runtime.images is not None
        assert ask(runtime, FIRST)[1] > 60


def test_a_model_without_encoder_takes_no_image(models):
    with models("qwen3-vl-moe").serving(mmproj="none") as runtime:
        assert runtime.images is None
        with pytest.raises(ConfigError, match="image"):
            list(posted(runtime, CHAT, messages=[FIRST], max_tokens=4))


_ANSWER = """
import json, sys
from pathlib import Path
from orchestrator.config import Config
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime
model, mmproj, body = sys.argv[1:]
config = Config.build(model=Path(model), mmproj=Path(mmproj), ctx=512, threads=1)
with Runtime.open(config, answering=Answering(images=True)) as runtime:
    (answer,) = runtime.submit(body.encode())
    print([each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]])
"""


def test_a_damaged_image_shows_no_memory(models, monkeypatch):
    """stb_image returns this JPEG before all its pixels are written. The rest must not be memory of
    other requests, so an answer about it does not depend on the contents of new memory."""
    out = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 90)).save(out, "JPEG")
    data = out.getvalue()
    scan = data.index(b"\xff\xda")
    begun = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big")
    restarts = b"\xff\xdd\x00\x04\x00\x01"  # after each block, but no block follows
    cut = data[:scan] + restarts + data[scan:begun] + b"\xff\xd9"
    url = f"data:image/jpeg;base64,{base64.b64encode(cut).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    asked = {"messages": [says("user", image, "What is it?")], "max_tokens": 4, "temperature": 0}
    qwen, answers = models("qwen3-vl-moe"), set()
    for filling in ("85", "170"):
        monkeypatch.setenv("MALLOC_PERTURB_", filling)
        body = json.dumps(asked | {"logprobs": True})
        done = python("-c", _ANSWER, qwen.path, qwen.mmproj, body)
        assert done.returncode == 0, done.stderr
        answers.add(done.stdout)
    assert len(answers) == 1
