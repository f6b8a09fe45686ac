"""Predicted choices of routers (DyMoE eq. 6), computed in numpy and compared with route events.

They are computed from the input of a layer and the router of a later layer.
"""

from dataclasses import dataclass, field

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.lab.observe import Observer
from orchestrator.policy import Policy
from orchestrator.policy.base import EVERY_STEP, About, PolicyRequirements
from orchestrator.runtime.runtime import Runtime

_LOGITS = "ffn_moe_logits-"


@dataclass(frozen=True)
class Gating:
    """How a family's router chooses k experts, as its authors define it.

    Scores are softmax or sigmoid. Of n_groups groups, the n_groups_used with the largest sum of
    their two best scores are used.
    """

    k: int = 2
    sigmoid: bool = False
    n_groups: int = 1
    n_groups_used: int = 1


@dataclass
class Watched:
    """Recorded data of each MoE layer.

    x: input of its router, float32 [T, n_embd]. ids: reported predictions [n_ahead, T, k]. scores:
    their scores, same shape. chosen: routed experts [T, k].
    """

    x: dict[int, np.ndarray] = field(default_factory=dict)
    ids: dict[int, np.ndarray] = field(default_factory=dict)
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    chosen: dict[int, np.ndarray] = field(default_factory=dict)


class Recorder(Policy):
    """A policy that records predictions and decides nothing."""

    about = About("recorder", wants=PolicyRequirements(EVERY_STEP))

    def __init__(self, placement, watched):
        super().__init__(placement)
        self.watched = watched

    def decide(self, event, view, out):
        layer, watched = event.layer, self.watched
        watched.ids[layer] = event.ahead_ids_array.copy()
        watched.scores[layer] = event.ahead_array.copy()
        watched.chosen[layer] = event.ids_array.copy()


def watch(path, tokens, n_ahead):
    """Run one batch of tokens in a managed model.

    Logits of all tokens are requested, so that the last layer gets all tokens.
    """
    watched = Watched()
    config = Config.build(
        model=path, policy="dymoe", low_tier="skip", retention=1.0, ctx=256, threads=1,
        expert_ram=64 << 20, n_ahead=n_ahead, prefetch="on",
    )  # fmt: skip
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        e.inside.driver.policy = Recorder(e.inside.policy.placement, watched)
        number = {str(il): layer for layer, il in enumerate(e.inside.model.layer_ids)}

        def keep(node):
            # shape [1, 1, T, n_embd]
            watched.x[number[node.name.removeprefix(_LOGITS)]] = node.source(1).array()[0, 0]

        def wanted(node):
            return node.name.startswith(_LOGITS) and node.op == "MUL_MAT"

        with Observer(e.inside.llama, len(tokens), 1, wanted, keep) as observer:
            observer.read(tokens)
    return watched


def weights(path, name):
    """Return a float32 tensor of each MoE layer, rows first. None for a layer without it."""
    found = []
    with ExpertModel.open(path) as model:
        for il in model.layer_ids:
            found.append(None)
            for part in model.parts:
                info = part.tensors.get(f"blk.{il}.{name}")
                if info is not None:
                    data = part.bytes_at(info.offset, info.nbytes).tobytes()
                    found[-1] = np.frombuffer(data, np.float32).reshape(info.shape[::-1])
    return found


def predict(x, router, gating, bias=None, choice_bias=None):
    """Return (ids [T, k], the best first; scores [T, E]; margin [T]).

    x [T, n_embd], router [E, n_embd]. bias [E] is added to the logits, choice_bias [E] only to the
    values by which experts are chosen (the scores of a sigmoid). margin: the smallest lead of a
    chosen expert over the next one. The look-ahead computes with routers and inputs in half
    precision.
    """
    halves = x.astype(np.float16), router.T.astype(np.float16)
    logits = halves[0].astype(np.float64) @ halves[1].astype(np.float64)
    if bias is not None:
        logits = logits + bias
    if gating.sigmoid:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    # softmax keeps the order of the logits, but distant ones get very small scores
    by = scores if gating.sigmoid else logits
    if choice_bias is not None:
        by = by + choice_bias
    if gating.n_groups > 1:
        grouped = by.reshape(len(x), gating.n_groups, -1)
        best_two = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-best_two, axis=1)[:, : gating.n_groups_used]
        allowed = np.zeros((len(x), gating.n_groups), bool)
        np.put_along_axis(allowed, kept, True, axis=1)
        by = np.where(np.repeat(allowed, grouped.shape[2], axis=1), by, -np.inf)
    order = np.argsort(-by, axis=1, kind="stable")
    ranked = np.take_along_axis(by, order, axis=1)
    lead = -np.diff(ranked[:, : gating.k + 1], axis=1).max(axis=1)
    return order[:, : gating.k], scores, lead


def check(path, tokens, gating, n_ahead=2):
    """Check that the reports of every layer equal the choices of the later routers by eq. 6.

    Choices closer than rounding errors may differ. They must be rare.
    """
    watched = watch(path, tokens, n_ahead)
    routers = weights(path, "ffn_gate_inp.weight")
    biases = weights(path, "ffn_gate_inp.bias")
    choice_biases = weights(path, "exp_probs_b.bias")
    n_layers, close, differs = len(routers), 0, 0
    for layer in range(n_layers - 1):
        depth = min(n_ahead, n_layers - 1 - layer)
        assert len(watched.ids[layer]) == depth
        for ahead in range(depth):
            target = layer + 1 + ahead
            router = routers[target]
            ids, scores, lead = predict(
                watched.x[layer], router, gating, biases[target], choice_biases[target]
            )
            clear = lead > 1e-4
            close += int((~clear).sum())
            where = f"layer {layer}, {ahead + 1} ahead"
            found = watched.ids[layer][ahead]
            np.testing.assert_array_equal(found[clear], ids[clear], err_msg=where)
            np.testing.assert_allclose(
                watched.scores[layer][ahead],
                np.take_along_axis(scores, found.astype(np.int64), axis=1),
                rtol=1e-4, atol=1e-6, err_msg=where,
            )  # fmt: skip
            differs += int((np.sort(found) != np.sort(watched.chosen[target])).any(axis=1).sum())
    assert close < len(tokens) // 10
    # otherwise a report of the later choices themselves would pass as well
    assert differs > 0
