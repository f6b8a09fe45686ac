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
from orchestrator.errors import BudgetError

from .servers import answered, serving

CHAT = "/v1/chat/completions"
IMAGES = image_models.images()
PROMPT = "Tell me about it."
N_TOKENS = 64
# Long enough for the longest image (300 tokens), the prompt and the answer.
CONTEXT = 512
# An image of Gemma 4 fits. The longest image does not.
BATCH = 256
# Two tokens are equally good if their logits differ by less.
TIE = 1e-3


@dataclass(frozen=True)
class Model:
    """A model and its image encoder."""

    path: Path
    mmproj: Path

    @property
    def expert_bytes(self):
        with ExpertModel.open(self.path) as file:
            return file.tier_bytes[0]

    def serving(self, **settings):
        """Open a runtime with this model. Few experts are resident, unless settings differ."""
        usual = {"policy": "lru", "ctx": CONTEXT, "ubatch": BATCH, "mmproj": self.mmproj}
        if not {"ram", "policy"} & settings.keys():
            usual["expert_ram"] = self.expert_bytes // 3
        return serving(model=self.path, **(usual | settings))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(family): a family's model, which is written once."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = Model(*image_models.write_model(family, folder))
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


def part(name):
    kind = {".png": "png", ".jpg": "jpeg"}[Path(name).suffix]
    data = base64.b64encode(IMAGES[name]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def about(runtime, *names, prompt=PROMPT):
    """Return the greedy answer to a prompt about images, list of Choice."""
    content = [*map(part, names), {"type": "text", "text": prompt}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": N_TOKENS}
    body = answered(runtime, CHAT, **asked, logprobs=True, top_logprobs=2)
    choices = []
    for each in body["choices"][0]["logprobs"]["content"]:
        best, second = (other["logprob"] for other in each["top_logprobs"])
        choices.append(unpatched.Choice(each["id"], best - second))
    return choices


def assert_same_tokens(ours, theirs):
    """Check that two answers have the same tokens up to a tie."""
    assert len(ours) == len(theirs) == N_TOKENS
    for i, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own.token != other.token:
            assert max(own.lead, other.lead) < TIE, f"token {i} differs"
            return


@pytest.mark.parametrize("name", IMAGES)
def test_answers_equal_upstreams(name, model, tmp_path, upstream):
    """With few resident experts, the tokens equal llama-mtmd-cli's for the same sizes."""
    with model.serving() as runtime:
        assert_same_tokens(about(runtime, name), upstream(model, tmp_path, name))


def test_answers_about_two_images_equal_upstreams(model, tmp_path, upstream):
    names = ("square.jpg", "wide.png")
    with model.serving() as runtime:
        assert_same_tokens(about(runtime, *names), upstream(model, tmp_path, *names))


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
        words = [word for option in options.items() for word in option]
        image = ",".join(map(str, paths))
        return found.about_image(model.path, model.mmproj, image, PROMPT, *words)

    return answer


def test_few_resident_experts_lose_nothing(model, plain):
    """Tokens and probabilities equal those of llama.cpp's own path."""
    with model.serving() as runtime:
        for name in IMAGES:
            assert about(runtime, name) == plain[name], name


def test_nothing_is_lost_in_the_least_memory(model, plain):
    """With the smallest --ram that a refusal names, the answers are the same."""
    with pytest.raises(BudgetError) as refused, model.serving(ram=1 << 20):
        pass
    with model.serving(ram=refused.value.needed_bytes) as runtime:
        for name in IMAGES:
            assert about(runtime, name) == plain[name], name


def test_images_are_recognised_by_content(model, plain):
    """An answer does not depend on an earlier prompt with another image in the same place."""
    with model.serving() as runtime:
        for name in ("square.jpg", "wide.png", "square.jpg", "square.jpg"):
            assert about(runtime, name) == plain[name]


def test_images_change_the_answer(plain):
    answers = [json.dumps([choice.token for choice in answer]) for answer in plain.values()]
    assert len(set(answers)) == len(IMAGES)
