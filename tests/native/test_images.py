"""Answers about images, by tiny models with image encoders.

They are compared with upstream's llama-mtmd-cli, and between managed experts and llama.cpp's own
path.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import image_models
import pytest
import unpatched
from image_models import FAMILIES

from gguf_tools.experts import ExpertModel
from orchestrator.errors import BudgetError, ConfigError

from .servers import MIB, posted, serving, whole

CHAT = "/v1/chat/completions"
IMAGES = image_models.images()
PROMPT = "Tell me about it."
N_TOKENS = 64
# Long enough for the longest image (300 tokens), the prompt and the answer.
CONTEXT = 512
# Smaller than the longest image.
BATCH = 256
# A model that computes an image at once needs images that fit into a micro-batch.
MOST_TOKENS = {"gemma4": BATCH}
# Two tokens are equally good if their logits differ by less.
TIE = 1e-3
# The same if prompts are read in other parts. The random models amplify the difference in rounding,
# up to 0.1 in the first tokens, with images as with text.
NEAR = 0.2
N_NEAR = 8
# Length of an answer before a next turn. Its tokens are read one by one or in one batch, so a long
# answer would add rounding.
N_SAID = 4


@dataclass(frozen=True)
class Model:
    """A model and its image encoder. most_tokens: limit for the tokens of an image, or None."""

    path: Path
    mmproj: Path
    most_tokens: int | None

    @property
    def expert_bytes(self):
        with ExpertModel.open(self.path) as file:
            return file.tier_bytes[0]

    @property
    def few(self):
        """Settings with which few of the experts are resident."""
        return {"policy": "lru", "expert_ram": self.expert_bytes // 3}

    def serving(self, **settings):
        """Open a runtime with this model.

        It keeps no copies of prompts, because the places of copies divide a prompt, and the sizes
        of its parts affect rounding.
        """
        usual = {"ctx": CONTEXT, "ubatch": BATCH, "image_max_tokens": self.most_tokens}
        usual |= {"cache_ram": 0, "mmproj": self.mmproj}
        return serving(model=self.path, **(usual | settings))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(family): a family's model, which is written once."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            paths = image_models.write_model(family, folder)
            made[family] = Model(*paths, MOST_TOKENS.get(family))
        return made[family]

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def model(models, request):
    return models(request.param)


@pytest.fixture(scope="module")
def plain(model):
    """Answers on llama.cpp's own path, by image name."""
    with model.serving(policy="plain") as runtime:
        return {name: about(runtime, name) for name in IMAGES}


@pytest.fixture(scope="module")
def managed(model):
    """A runtime in which few of the experts are resident."""
    with model.serving(**model.few) as runtime:
        yield runtime


def part(name):
    kind = {".png": "png", ".jpg": "jpeg"}[Path(name).suffix]
    data = base64.b64encode(IMAGES[name]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def asked_about(*names):
    """Return a user's message with images and the prompt."""
    return {"role": "user", "content": [*map(part, names), {"type": "text", "text": PROMPT}]}


def choices_in(body):
    """Return the tokens of an answer, list of Choice."""
    choices = []
    for each in body["choices"][0]["logprobs"]["content"]:
        best, second = (other["logprob"] for other in each["top_logprobs"])
        choices.append(unpatched.Choice(each["id"], best - second))
    return choices


def begin_answer_to(runtime, messages, sequence=0, **settings):
    """Submit a request for the greedy answer to messages.

    The prompt is read from its beginning, because the sizes of its parts affect rounding.
    """
    asked = {"messages": messages, "max_tokens": N_TOKENS, "logprobs": True, "top_logprobs": 2}
    asked |= {"temperature": 0, "cache_prompt": False, "id_slot": sequence} | settings
    return posted(runtime, CHAT, sequences=(sequence,), **asked)


def body_of(answer):
    """Wait for an answer that must succeed, and return its body."""
    status, text = whole(answer)
    assert status == 200, text
    return json.loads(text)


def answer_to(runtime, messages, **settings):
    """Return the body of the greedy answer to messages."""
    return body_of(begin_answer_to(runtime, messages, **settings))


def about(runtime, *names, **settings):
    """Return the greedy answer to the prompt about images, list of Choice."""
    return choices_in(answer_to(runtime, [asked_about(*names)], **settings))


def assert_same(ours, theirs, n_tokens=N_TOKENS, tie=TIE):
    """Check that two answers have the same tokens up to a tie, with the same leads."""
    assert len(ours) == len(theirs) == N_TOKENS
    for i, (own, other) in enumerate(zip(ours[:n_tokens], theirs[:n_tokens], strict=True)):
        if own.token != other.token:
            assert max(own.lead, other.lead) < tie, f"token {i} differs"
            return
        assert abs(own.lead - other.lead) < tie, f"the lead of token {i} differs"


def assert_near(ours, theirs):
    """Check two answers to a prompt that was read in different parts."""
    assert_same(ours, theirs, N_NEAR, NEAR)


@pytest.fixture(scope="module")
def upstream():
    """upstream(model, folder, *images): the answer of llama-mtmd-cli."""
    found = unpatched.find()
    if isinstance(found, str):
        pytest.skip(found)

    def answer(model, folder, *names):
        paths = [folder / name for name in names]
        for path in paths:
            path.write_bytes(IMAGES[path.name])
        options = {"-n": N_TOKENS, "-c": CONTEXT, "-b": BATCH, "-ub": BATCH, "-t": 1, "-fa": "auto"}
        options |= {"-ctk": "f16", "-ctv": "f16"}
        if model.most_tokens:
            options["--image-max-tokens"] = model.most_tokens
        words = [word for option in options.items() for word in option]
        image = ",".join(map(str, paths))
        return found.about_image(model.path, model.mmproj, image, PROMPT, *words)

    return answer


@pytest.mark.parametrize("name", IMAGES)
def test_answers_equal_upstreams(name, managed, model, tmp_path, upstream):
    """With few resident experts, the tokens equal llama-mtmd-cli's for the same sizes."""
    assert_same(about(managed, name), upstream(model, tmp_path, name))


def test_answers_about_two_images_equal_upstreams(managed, model, tmp_path, upstream):
    names = ("square.jpg", "wide.png")
    assert_same(about(managed, *names), upstream(model, tmp_path, *names))


def test_images_change_the_answer(plain):
    answers = [tuple(choice.token for choice in answer) for answer in plain.values()]
    assert len(set(answers)) == len(IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_few_resident_experts_lose_nothing(name, managed, plain):
    """Tokens and probabilities equal those of llama.cpp's own path."""
    assert about(managed, name) == plain[name]


def test_nothing_is_lost_in_the_least_memory(model, plain):
    """With the smallest --ram that a refusal names, the answers are the same."""
    with pytest.raises(BudgetError) as refused, model.serving(policy="lru", ram=1 << 20):
        pass
    with model.serving(policy="lru", ram=refused.value.needed_bytes) as runtime:
        for name in IMAGES:
            assert about(runtime, name) == plain[name], name


@pytest.fixture(scope="module")
def keeping(model):
    """A runtime in which few of the experts are resident, and that keeps copies of prompts."""
    with model.serving(**model.few, cache_ram=64 * MIB) as runtime:
        yield runtime


def test_images_are_recognised_by_content(keeping, plain):
    """A prompt that differs from an earlier one only in its image does not reuse that image."""
    for name in ("square.jpg", "dot.png", "square.jpg", "square.jpg"):
        answer = about(keeping, name, cache_prompt=True)
        assert_near(answer, plain[name])


def counts(body):
    """Return the numbers of prompt tokens that were reused, and that were read."""
    usage = body["usage"]
    n_reused = usage["prompt_tokens_details"]["cached_tokens"]
    return n_reused, usage["prompt_tokens"] - n_reused


def continued(messages, body):
    """Return the messages of the next turn after the answer in `body`."""
    said = {"role": "assistant", "content": body["choices"][0]["message"]["content"]}
    return [*messages, said, {"role": "user", "content": "And?"}]


def test_the_next_turn_does_not_read_its_image_again(keeping):
    """A prompt about another image is read in between."""
    first, other = [asked_about("wide.png")], [asked_about("tall.png")]
    begun = answer_to(keeping, first, cache_prompt=True, max_tokens=N_SAID)
    n_reused, n_read = counts(answer_to(keeping, other, cache_prompt=True))
    assert n_reused < n_read  # the text before the image
    messages = continued(first, begun)
    after = answer_to(keeping, messages, cache_prompt=True)
    n_reused, n_read = counts(after)
    assert n_read < 40 < n_reused
    assert_near(choices_in(after), choices_in(answer_to(keeping, messages)))


def test_a_saved_conversation_does_not_read_its_image_again(model, tmp_path):
    settings = {**model.few, "prompt_cache": tmp_path}
    first = [asked_about("wide.png")]
    with model.serving(**settings) as runtime:
        begun = answer_to(runtime, first, cache_prompt=True, max_tokens=N_SAID)
    messages = continued(first, begun)
    with model.serving(**settings) as runtime:
        after = answer_to(runtime, messages, cache_prompt=True)
        n_reused, n_read = counts(after)
        assert n_read < 40 < n_reused
        assert_near(choices_in(after), choices_in(answer_to(runtime, messages)))


def test_answers_at_the_same_time(model, plain):
    """Two conversations are computed in the same steps, except for their images."""
    names = ("wide.png", "tall.png")
    with model.serving(parallel=2, **model.few) as runtime:
        begun = [begin_answer_to(runtime, [asked_about(each)], i) for i, each in enumerate(names)]
        for name, answer in zip(names, begun, strict=True):
            assert_near(choices_in(body_of(answer)), plain[name])


def test_a_micro_batch_that_divides_images_is_refused(models):
    """Gemma 4 computes the tokens of an image at once."""
    made = models("gemma4")
    with (
        pytest.raises(ConfigError, match="--ubatch 128 is too small for images"),
        made.serving(ubatch=128),
    ):
        pass
