"""Two prompts and an answer in one step: each is decided as it is alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from orchestrator.events import ABSENT, SKIP, RouteEvent, StoreView

from .conftest import drawn, opened
from .decoder import Decoder, Token, prompt

WINDOW = 4
READ = drawn(9, 2)
ANSWER = [Token(17, len(READ), 2, wanted=True)]


def prompt_of(sequence: int, n: int) -> list[Token]:
    return prompt(drawn(n, 10 + sequence), 0, sequence)


def in_turns(*parts: Sequence[Token]) -> list[Token]:
    """The tokens of several sequences, one of each as long as there are any."""
    longest = max(map(len, parts))
    return [part[at] for at in range(longest) for part in parts if at < len(part)]


# The first three have as many tokens, windows and outputs, so that llama.cpp keeps the graph.
STEPS = {
    "one after the other": [*ANSWER, *prompt_of(0, 19), *prompt_of(1, 12)],
    "other places": [*prompt_of(1, 21), *ANSWER, *prompt_of(0, 10)],
    "in turns": in_turns(prompt_of(0, 15), ANSWER, prompt_of(1, 16)),
    "one shorter than a window": [*prompt_of(0, 14), *prompt_of(1, 3), *ANSWER],
    "one of a single token": [*prompt_of(1, 1), *ANSWER, *prompt_of(0, 14)],
}


@dataclass
class Decided:
    """What a policy made of one layer: experts [T, k], importance [T] where there is one, the tier
    of each expert now and, where it is asked for, ahead."""

    ids: np.ndarray
    sequences: np.ndarray
    importance: np.ndarray | None
    tiers: np.ndarray
    ahead: dict[int, int]


class Watched:
    """A context beside an engine's, whose policy decides, and whose experts are computed high all
    the same: else a layer's input would depend on who shares the step."""

    def __init__(self, model: Path, low: str) -> None:
        asked = {"high_tier": "q4_k", "low_tier": low, "retention": 0.5, "prefetch": "on"}
        asked |= {"policy": "dymoe", "expert_ram": 64 << 20, "importance_window": WINDOW}
        self.engine = opened(model, ubatch=64, **asked)
        self.policy, self.store = self.engine.policy, self.engine.store
        shape = self.policy.shape
        self.policy._prompts.room = [(shape.n_expert, shape.n_expert)] * shape.n_layers
        size = shape.n_layers, shape.n_expert
        self.nothing = StoreView(np.full(size, ABSENT, np.uint8), np.full(size, 255, np.uint8))
        self.decoder = Decoder(self.engine._loaded.model, n_ubatch=64)
        self.store.set_route(self.on_route)
        self.layers: list[Decided] = []

    def on_route(self, event: RouteEvent) -> None:
        out, scores = self.store.decision, event.importance_array
        self.policy.decide(event, self.nothing, out)
        ahead: dict[int, int] = {}
        for key in out._prefetch[: out.n_prefetch]:
            assert key & 0xFFFF == event.layer + 1
            ahead[key >> 16 & 0xFFFF] = key >> 32 & 0xFF
        self.layers.append(
            Decided(
                event.ids_array.copy(),
                event.sequences_array.copy(),
                None if scores is None else scores.copy(),
                out.tier_array.copy(),
                ahead,
            )
        )
        out.tier_array[:] = 0
        out.n_prefetch = 0
        self.store.apply(out)

    def step(self, tokens: Sequence[Token]) -> list[Decided]:
        """The layers of this step, the only one but for what the answer's sequence read."""
        self.decoder.forget()
        if any(each.sequence == 2 for each in tokens):
            assert self.decoder.decode(prompt(READ, 0, 2)) == 0
        self.layers = []
        assert self.decoder.decode(tokens) == 0
        return self.layers

    def close(self) -> None:
        self.decoder.close()
        self.engine.close()


@pytest.fixture(params=["q2_k", "skip"])
def watched(request: pytest.FixtureRequest, both: Path) -> Iterator[Watched]:
    made = Watched(both, request.param)
    yield made
    made.store.check()
    made.close()


def test_each_sequence_is_decided_as_alone(watched: Watched) -> None:
    """The attention that a prompt's tokens receive is what they receive alone, but for rounding. An
    expert gets the best tier of those that the sequences ask for by themselves, now and ahead."""
    n_low = 0
    for name, tokens in STEPS.items():
        alone = {
            sequence: watched.step([each for each in tokens if each.sequence == sequence])
            for sequence in range(3)
        }
        together = watched.step(tokens)
        assert len(together) == watched.engine.model.n_layers
        for layer, joint in enumerate(together):
            tiers: dict[int, int] = {}
            ahead: dict[int, int] = {}
            for sequence, layers in alone.items():
                mine, rows = layers[layer], joint.sequences == sequence
                np.testing.assert_array_equal(joint.ids[rows], mine.ids, f"{name} {layer}")
                now = {expert: int(mine.tiers[expert]) for expert in np.unique(mine.ids).tolist()}
                for asked, found in ((now, tiers), (mine.ahead, ahead)):
                    for expert, tier in asked.items():
                        found[expert] = min(found.get(expert, SKIP), tier)
                if mine.importance is not None and len(mine.ids) > 1:
                    assert joint.importance is not None
                    np.testing.assert_allclose(
                        joint.importance[rows], mine.importance, rtol=1e-3, atol=1e-5
                    )
            assert {each: int(joint.tiers[each]) for each in tiers} == tiers, f"{name} {layer}"
            assert joint.ahead == ahead, f"{name} {layer}"
            n_low += sum(tier != 0 for tier in tiers.values())
    assert n_low > 0


def test_the_last_tokens_of_each_prompt_are_its_window(watched: Watched) -> None:
    """Of a prompt that begins in the step, its queries give all that they have to its tokens. The
    graph that is kept for the next step takes the queries of that one."""
    for name, tokens in STEPS.items():
        first = watched.step([each for each in tokens if each.sequence != 2])[0]
        assert first.importance is not None
        for sequence in range(2):
            mine = first.importance[first.sequences == sequence]
            if len(mine) == 1:
                continue  # it goes by its gates
            assert mine.sum() == pytest.approx(min(WINDOW, len(mine)), rel=1e-4), name
    perf = watched.decoder.api.llama_perf_context(watched.decoder.handle)
    assert perf.n_reused == 2
