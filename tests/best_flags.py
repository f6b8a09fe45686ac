"""Managed experts that are all in memory against upstream at its best flags, shape by shape.

    python tests/best_flags.py make                   writes the models: 17 GB in the user cache
    python tests/best_flags.py run [--only WORD,...] [--avx2 FOLDER] [--seconds 40]

A line for each combination: the better of upstream with and without repacked weights, over ours, as
a median of turns with its 95 % interval; above 1 ours is faster. All three are loaded at once and
take turns, so that whatever else the machine does meets all. --avx2 adds the rows of a library
without AVX-512, in a folder that this makes:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
        -DGGML_BMI2=ON" python3 patches/tool.py build     prints the wheel; unzip it into FOLDER
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paired import HERE, Side

SHAPES = ("olmoe", "qwen3-30b", "mixtral")
TYPES = ("q4_k", "q4_0", "q2_k")
PROMPTS = (128, 512, 2048)
LIBRARY = "LLAMA_CPP_LIB_PATH"
# Steps of one turn, and the fewest turns of a combination; of prompts a turn is one.
STEPS, LEAST_TURNS = 8, 3
# Seconds between two turns: OpenMP's threads spin on for some 20 ms behind their last step.
PAUSE = 0.1


class Combination(NamedTuple):
    """prompt: tokens of a prompt, 0 for decoding. avx2: by the library without AVX-512."""

    shape: str
    tier: str
    prompt: int
    avx2: bool

    def __str__(self) -> str:
        what = f"prompt {self.prompt}" if self.prompt else "decode"
        return f"{'avx2' if self.avx2 else 'native'} {self.shape} {self.tier} {what}"


def combinations(avx2: bool) -> Iterator[Combination]:
    """Those of one model and library stand together."""
    for shape in SHAPES:
        for tier in TYPES:
            yield Combination(shape, tier, 0, False)
            for prompt in PROMPTS:
                yield Combination(shape, tier, prompt, False)
    if avx2:
        for shape in SHAPES:
            for tier in TYPES:
                yield Combination(shape, tier, 0, True)
        yield Combination(SHAPES[0], TYPES[0], 512, True)


def model_path(shape: str, tier: str, make: bool) -> Path:
    """The model that `moe-edge bench` would make, of a few layers."""
    from orchestrator.lab.bench.models import build_uniform
    from orchestrator.lab.bench.options import BenchOptions

    def note(text: str) -> None:
        if not make:
            sys.exit(f"{shape} in {tier} is not there: run `python tests/best_flags.py make` first")
        print(text, flush=True)

    return build_uniform(BenchOptions(shape=shape, routing="zipf"), tier, note)


def sides(path: Path, threads: int, prompt: int) -> dict[str, Side]:
    """Ours as it comes, and upstream with and without repacked weights."""
    at_once = max(64, min(prompt, 512))
    ours = {"model": str(path), "policy": "lru", "force_managed": True, "ctx": 4096}
    theirs: dict[str, Any] = {"path": str(path), "upstream": True, "n_ctx": 4096}
    theirs |= {"n_ubatch": at_once, "threads": threads}
    asked = {
        "ours": ours | {"ubatch": at_once, "threads": threads},
        "repack": theirs,
        "no repack": theirs | {"extra_bufts": False},
    }
    return {name: Side(HERE, sys.executable, settings) for name, settings in asked.items()}


def measure(made: dict[str, Side], prompt: int, seconds: float) -> list[dict[str, float]]:
    """Milliseconds of a median step or prompt, turn by turn."""
    steps = 2 if prompt else STEPS + 1
    for side in made.values():
        side.run(steps, prompt)
    turns: list[dict[str, float]] = []
    order, end = list(made), time.perf_counter() + seconds
    while len(turns) < LEAST_TURNS or time.perf_counter() < end:
        turn = {}
        for name in order:
            time.sleep(PAUSE)
            turn[name] = statistics.median(made[name].run(steps, prompt))
        turns.append(turn)
        order.reverse()
    return turns


def verdict(turns: list[dict[str, float]]) -> str:
    """The ratio of the better upstream, over all turns, over ours."""
    best = min(("repack", "no repack"), key=lambda name: statistics.median(t[name] for t in turns))
    ratios = [turn[best] / turn["ours"] for turn in turns]
    rng = random.Random(1)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    shown = ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items())
    return (
        f"{statistics.median(ratios):.3f} ({drawn[50]:.3f} to {drawn[-51]:.3f}) of {best}; "
        f"{len(ratios)} turns; {shown}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("--only", default="", help="combinations with one of these words")
    parser.add_argument("--avx2", type=Path, help="where a wheel without AVX-512 was unzipped")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each combination")
    parser.add_argument("--shapes", default="", help="other shapes of moe-edge bench")
    parser.add_argument("--types", default="", help="other types of the experts")
    asked = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from gguf_tools.process import default_threads

    global SHAPES, TYPES
    SHAPES = tuple(filter(None, asked.shapes.split(","))) or SHAPES
    TYPES = tuple(filter(None, asked.types.split(","))) or TYPES
    words = [word for word in asked.only.split(",") if word]
    found = [
        each
        for each in combinations(asked.avx2 is not None)
        if not words or any(word in str(each) for word in words)
    ]
    if asked.what == "make":
        for shape, tier in dict.fromkeys((each.shape, each.tier) for each in found):
            print(model_path(shape, tier, make=True))
        return
    for model in dict.fromkeys((each.shape, each.tier, each.avx2) for each in found):
        shape, tier, avx2 = model
        path = model_path(shape, tier, make=False)
        os.environ.pop(LIBRARY, None)
        if avx2:
            os.environ[LIBRARY] = str(asked.avx2 / "llama_cpp" / "lib")
        mine = [each for each in found if (each.shape, each.tier, each.avx2) == model]
        for prompts in (False, True):
            some = [each for each in mine if bool(each.prompt) == prompts]
            if not some:
                continue
            made = sides(path, default_threads(), max(each.prompt for each in some))
            for each in some:
                turns = measure(made, each.prompt, asked.seconds)
                print(f"{each!s:32} {verdict(turns)}", flush=True)
            for side in made.values():
                side.close()


if __name__ == "__main__":
    main()
