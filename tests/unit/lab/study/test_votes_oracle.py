"""Figure 7 of FIRM-MoE, compared with a second implementation of its equations: sets of experts for
one token and one layer."""

import re

import numpy as np
import pytest

from orchestrator.lab.eval.text import Window
from orchestrator.lab.study.activations import ROUTER_INPUT, ROUTER_LOGITS
from orchestrator.lab.study.votes import Voted

DEEPEST = 4
WIDTH = 6


def scores_of(x, w_g):
    """x W_g of eq. 4: a score for each expert."""
    return [sum(float(x[i]) * float(w_g[i][e]) for i in range(len(x))) for e in range(len(w_g[0]))]


def top_k_indices(scores, k):
    """TopKIndices of eq. 4 and 5, best first."""
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


def expected(label, x, w_g, layer, k):
    """The set S_l of predicted experts, by the label of a row.

    x: [layers][width], router inputs of one token. w_g: [width][experts], the router of the layer.
    """

    def s(m, n):
        return set(top_k_indices(scores_of(x[m], w_g), n))

    def before(p):
        return range(max(0, layer - p), layer)  # m = l-P .. l-1 of eq. 6, as many as exist

    if found := re.fullmatch(r"top (\d+)", label):
        return s(layer - 1, int(found[1]))
    if found := re.fullmatch(r"union P=(\d+)", label):
        return set().union(*(s(m, k) for m in before(int(found[1]))))
    if found := re.fullmatch(r"MoL K=(\d+) P=(\d+)", label):
        return set.intersection(*(s(m, int(found[1])) for m in before(int(found[2]))))
    if found := re.fullmatch(r"weighted >= ([\d.]+)", label):
        worth = {m: 1.5 - 0.5 * (layer - 1 - m) for m in before(3)}
        needed = min(float(found[1]), sum(worth.values()))
        every = set().union(*(s(m, k) for m in worth))
        return {e for e in every if sum(w for m, w in worth.items() if e in s(m, k)) >= needed}
    if found := re.fullmatch(r"margin, K=(\d+)", label):
        nearest = scores_of(x[layer - 1], w_g)
        ranked = top_k_indices(nearest, k)
        # The threshold rises by half an octave above the k-th score for each candidate less, in
        # shares of a softmax.
        least = nearest[ranked[-1]] + (k - int(found[1])) * np.log(2) / 2
        return {e for e in ranked if nearest[e] >= least - 1e-9}
    raise AssertionError(f"unknown strategy in the table: {label!r}")


def study(xs, routers, layer_ids, k, windows):
    """Counts of the study for these router inputs. xs: [layers, tokens, width] for each window."""
    n_expert = len(routers[layer_ids[0]])
    found = Voted(len(layer_ids), k, n_expert)
    for x, window in zip(xs, windows, strict=True):
        read = {(ROUTER_INPUT, il): x[at] for at, il in enumerate(layer_ids)}
        read |= {(ROUTER_LOGITS, il): x[at] @ routers[il].T for at, il in enumerate(layer_ids)}
        found.count(read, layer_ids, [routers[il] for il in layer_ids], window.first)
    return found


@pytest.mark.parametrize(
    ("seed", "n_layers", "n_expert", "k"), [(1, 6, 8, 4), (2, 5, 16, 2), (3, 2, 9, 3), (4, 7, 6, 5)]
)
def test_figure_7_follows_from_its_equations(seed, n_layers, n_expert, k):
    rng = np.random.default_rng(seed)
    layer_ids = [2 * at + 1 for at in range(n_layers)]  # with dense layers in between
    windows = [
        Window([number] * n, first, "") for number, (n, first) in enumerate([(7, 3), (4, 1)])
    ]
    xs = [rng.normal(size=(n_layers, len(each.tokens), WIDTH)).cumsum(axis=0) for each in windows]
    routers = {il: rng.normal(size=(n_expert, WIDTH)) for il in layer_ids}
    found = study(xs, routers, layer_ids, k, windows)
    rows = found.rows()
    assert [row["strategy"] for row in rows] == list(found.strategies)

    sums = {}  # (strategy, layer): |S and A|, |S|, |A|, summed over tokens
    recalls = {}  # recall of the top k, by distance in layers
    n_tokens = 0
    for x, window in zip(xs, windows, strict=True):
        for token in range(window.first, len(window.tokens)):
            n_tokens += 1
            mine = x[:, token]
            for layer in range(1, n_layers):
                w_g = routers[layer_ids[layer]].T
                used = set(top_k_indices(scores_of(mine[layer], w_g), k))
                for row in rows:
                    named = expected(row["strategy"], mine, w_g, layer, k)
                    add = np.array([len(named & used), len(named), len(used)])
                    key = row["strategy"], layer
                    sums[key] = sums.get(key, 0) + add
                for d in range(1, min(DEEPEST, layer) + 1):
                    guess = set(top_k_indices(scores_of(mine[layer - d], w_g), k))
                    recalls.setdefault(d, []).append(len(guess & used) / k)
    layers = range(1, n_layers)
    of_top = [0.0]  # how many of the nearest layer's first n are right, per layer and token
    for n in range(1, found.most + 1):
        right = sum(sums[f"top {n}", layer][0] for layer in layers)
        of_top.append(right / (n_tokens * len(layers)))
    for row in rows:
        both, named, used = sum(sums[row["strategy"], layer] for layer in layers)
        size = named / (n_tokens * len(layers))
        assert row["size"] == pytest.approx(size)
        assert row["accuracy"][0] == pytest.approx(both / used)  # eq. 7
        if named:
            assert row["utilisation"][0] == pytest.approx(both / named)  # eq. 8
        else:
            assert row["utilisation"] is None
        if row["way"] != "rank" and 0 < size <= found.most:
            n = min(int(size), found.most - 1)
            right = of_top[n] + (size - n) * (of_top[n + 1] - of_top[n])
            assert row["cut"] == pytest.approx(right / size)
        for layer in layers:
            both, named, used = sums[row["strategy"], layer]
            one = found.row(row["strategy"], [layer - 1])
            assert one["size"] == pytest.approx(named / n_tokens)
            assert one["accuracy"][0] == pytest.approx(both / used)
    assert found.distance.keys() == recalls.keys()
    for d, values in recalls.items():
        assert sorted(found.distance[d]) == pytest.approx(sorted(values))
