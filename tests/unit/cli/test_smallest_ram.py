"""The smallest --ram that a refusal names works, and 2 MiB less is refused, for models and commands
that count their memory differently."""

import re
from dataclasses import replace

import pytest
from command_line import run
from served import library_path, serving

from gguf_tools import synthetic
from orchestrator.settings import parse_size

MIB = 2**20
TINY = synthetic.preset("tiny-qwen3moe")
SHAPES = {
    "one tier": (TINY, ("q4_k",)),
    "two tiers": (TINY, ("q4_k", "q2_k")),
    "long context": (replace(TINY, context=65536, n_expert=64), ("q8_0", "q2_k")),
    "latent attention": (synthetic.preset("tiny-deepseek2"), ("q4_k", "q2_k")),
    "shared experts": (synthetic.preset("tiny-qwen2moe"), ("q8_0", "q4_k", "q2_k")),
}
FRONT_ENDS = {
    "chat": ("chat", "-p", "hello", "--max-tokens=2"),
    "chat that skips": ("chat", "-p", "hello", "--max-tokens=2", "--low-tier=skip"),
    "trace": ("trace", "-p", "hello", "--tokens=2", "--out=trace.npz", "--force"),
    "eval": ("eval", "--text=text.txt", "--max-tokens=32"),
    "serve": ("serve",),
}
_NAMED = re.compile(
    r"the smallest --ram that works with the policy \w+ and a context of \d+ tokens"
    r" is ([\d.]+ [KMG]iB)"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: synthetic.write(folder / f"{name}.gguf", shape, tiers=tiers)
        for name, (shape, tiers) in SHAPES.items()
    }


def refusal(words):
    """The smallest --ram, in bytes, that the refusal of this command names."""
    done = run(*words)
    found = _NAMED.search(done.stderr)
    assert done.exit_code == 1 and found, done.output
    return parse_size(found[1])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_smallest_ram_works_and_2_mib_less_is_refused(
    shape, front_end, models, library, user_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if front_end == "serve":
        library_path()
    (tmp_path / "text.txt").write_text("A text that is read. " * 20)
    own = ("--policy=dymoe", f"--model={models[shape]}")
    words = (*FRONT_ENDS[front_end], *own)
    least = refusal((*words, "--ram=1MiB"))
    assert abs(refusal((*words, f"--ram={least - 2 * MIB}")) - least) <= MIB
    if front_end != "serve":
        done = run(*words, f"--ram={least}")
        assert done.exit_code == 0, done.output
        return
    with serving(user_folder / "cache", *own, f"--ram={least}") as server:
        answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] == 2
