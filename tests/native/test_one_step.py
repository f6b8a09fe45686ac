"""Two prompts and an answer in one step: the policy gets the same data as if each ran alone."""

import numpy as np
import pytest

from .conftest import drawn, opened
from .decoder import Decoder, Token, prompt

WINDOW = 4
READ = drawn(9, 2)
ANSWER = [Token(17, len(READ), 2, wanted=True)]


def prompt_of(sequence, n):
    return prompt(drawn(n, 10 + sequence), 0, sequence)


def in_turns(*parts):
    """Interleave the tokens of several sequences."""
    longest = max(map(len, parts))
    return [part[at] for at in range(longest) for part in parts if at < len(part)]


# The first three steps have the same number of tokens, windows and outputs, so llama.cpp reuses its
# graph.
STEPS = {
    "in sequence": [*ANSWER, *prompt_of(0, 19), *prompt_of(1, 12)],
    "in another order": [*prompt_of(1, 21), *ANSWER, *prompt_of(0, 10)],
    "interleaved": in_turns(prompt_of(0, 15), ANSWER, prompt_of(1, 16)),
    "one shorter than a window": [*prompt_of(0, 14), *prompt_of(1, 3), *ANSWER],
    "one of a single token": [*prompt_of(1, 1), *ANSWER, *prompt_of(0, 14)],
}


class Watched:
    """A second context on a runtime's model that records the routing events of each layer.

    All experts are computed in the high tier. Otherwise a layer's input would depend on the other
    sequences of the step. layers: for each layer the experts [T, k], the sequence of each token
    [T], the importance [T] and the predicted experts of the next layer [T, k], if present.
    """

    def __init__(self, model):
        asked = {"low_tier": "q2_k", "importance_window": WINDOW, "prefetch": "on"}
        self.runtime = opened(model, ubatch=64, policy="dymoe", expert_ram=64 << 20, **asked)
        self.store = self.runtime.inside.store
        self.decoder = Decoder(self.runtime.inside.llama, n_ubatch=64)
        self.store.set_route(self.on_route)
        self.layers = []

    def on_route(self, event):
        arrays = {"ids": event.ids_array, "sequences": event.sequences_array}
        if event.importance_array is not None:
            arrays["importance"] = event.importance_array
        if event.n_ahead:
            arrays["ahead"] = event.ahead_ids_array[0]
        self.layers.append({name: array.copy() for name, array in arrays.items()})
        out = self.store.decision
        out.tier_array[:] = 0
        out.n_prefetch = 0
        self.store.apply(out)

    def step(self, tokens):
        """Decode tokens as one step and return its layers.

        The answer's sequence first reads its prompt.
        """
        self.decoder.forget()
        if any(each.sequence == 2 for each in tokens):
            assert self.decoder.decode(prompt(READ, 0, 2)) == 0
        self.layers = []
        assert self.decoder.decode(tokens) == 0
        return self.layers

    def close(self):
        self.decoder.close()
        self.runtime.close()


@pytest.fixture
def watched(both):
    made = Watched(both)
    yield made
    made.store.check()
    made.close()


def test_each_sequence_gets_the_data_of_a_step_alone(watched):
    """Experts and predictions are equal. The importance agrees within a relative 1e-3."""
    n_scored = n_ahead = 0
    for name, tokens in STEPS.items():
        alone = [
            watched.step([each for each in tokens if each.sequence == sequence])
            for sequence in range(3)
        ]
        together = watched.step(tokens)
        assert len(together) == watched.runtime.model.n_layers
        for layer, joint in enumerate(together):
            for sequence, layers in enumerate(alone):
                mine, rows = layers[layer], joint["sequences"] == sequence
                for exact in {"ids", "ahead"} & mine.keys():
                    np.testing.assert_array_equal(
                        joint[exact][rows], mine[exact], f"{name} {layer}"
                    )
                    n_ahead += exact == "ahead"
                if "importance" in mine and len(mine["ids"]) > 1:
                    np.testing.assert_allclose(
                        joint["importance"][rows], mine["importance"], rtol=1e-3, atol=1e-5
                    )
                    n_scored += 1
    assert n_scored > 0 and n_ahead > 0


def test_each_prompt_has_its_own_window(watched):
    """The importance of a prompt sums to its window, which is at most 4 queries.

    The graph that llama.cpp reuses for the next step uses that step's queries.
    """
    for name, tokens in STEPS.items():
        first = watched.step([each for each in tokens if each.sequence != 2])[0]
        for sequence in range(2):
            mine = first["importance"][first["sequences"] == sequence]
            if len(mine) == 1:
                continue  # one token has no importance; its gate weights are used
            assert mine.sum() == pytest.approx(min(WINDOW, len(mine)), rel=1e-4), name
    perf = watched.decoder.api.llama_perf_context(watched.decoder.handle)
    assert perf.n_reused == 2
