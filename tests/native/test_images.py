"""Answers about images, by tiny models with image encoders.

They are compared with upstream's llama-mtmd-cli, and between managed experts and llama.cpp's own
path.
"""

import base64
from dataclasses import dataclass
from pathlib import Path

import image_models
import pytest
import unpatched
from image_models import FAMILIES

from gguf_tools.experts import ExpertModel
from orchestrator.errors import BudgetError

from .servers import answered, serving

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

    def serving(self, **settings):
        """Open a runtime with this model."""
        usual = {"ctx": CONTEXT, "ubatch": BATCH, "image_max_tokens": self.most_tokens}
        return serving(model=self.path, mmproj=self.mmproj, **(usual | settings))


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
    with model.serving(policy="lru", expert_ram=model.expert_bytes // 3) as runtime:
        yield runtime


def part(name):
    kind = {".png": "png", ".jpg": "jpeg"}[Path(name).suffix]
    data = base64.b64encode(IMAGES[name]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def about(runtime, *names, **settings):
    """Return the greedy answer to a prompt about images, list of Choice.

    The prompt is read from its beginning, because the sizes of batches affect rounding.
    """
    content = [*map(part, names), {"type": "text", "text": PROMPT}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": N_TOKENS}
    asked |= {"logprobs": True, "top_logprobs": 2, "cache_prompt": False}
    body = answered(runtime, CHAT, **(asked | settings))
    choices = []
    for each in body["choices"][0]["logprobs"]["content"]:
        best, second = (other["logprob"] for other in each["top_logprobs"])
        choices.append(unpatched.Choice(each["id"], best - second))
    return choices


def assert_same_tokens(ours, theirs, tie=TIE):
    """Check that two answers have the same tokens up to a tie."""
    assert len(ours) == len(theirs) == N_TOKENS
    for i, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own.token != other.token:
            assert max(own.lead, other.lead) < tie, f"token {i} differs"
            return


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
    assert_same_tokens(about(managed, name), upstream(model, tmp_path, name))


def test_answers_about_two_images_equal_upstreams(managed, model, tmp_path, upstream):
    names = ("square.jpg", "wide.png")
    assert_same_tokens(about(managed, *names), upstream(model, tmp_path, *names))


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


def test_images_are_recognised_by_content(managed, plain):
    """A prompt that differs from an earlier one only in its image does not reuse that image."""
    for name in ("square.jpg", "dot.png", "square.jpg", "square.jpg"):
        answer = about(managed, name, cache_prompt=True)
        assert_same_tokens(answer, plain[name], tie=50 * TIE)
