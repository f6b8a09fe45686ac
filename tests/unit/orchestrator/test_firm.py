"""FIRM: prefetch requests and reports, votes (FIRM-MoE, eq. 4 to 8) and their tuning (eq. 11 and
Algorithm 1), compared with values by hand."""

import numpy as np
import pytest
from shapes import (
    DOWN,
    GATE,
    UP,
    least_of,
    make_decision,
    make_event,
    make_shape,
    make_view,
    policy_of,
    prefetches,
)
from tables import cases

from orchestrator.errors import ConfigError, PolicyError, SettingError
from orchestrator.events import ABSENT, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy.dymoe import DyMoE
from orchestrator.policy.firm import (
    FIRM,
    Climb,
    Tuner,
    Weights,
    agreed,
    expected_sets,
    group_of,
    mask_of,
    read_votes,
)

SHAPE = make_shape(n_layers=6, n_expert=16, k=4, tiers=("q4_k",))
STEP_DONE = StepReport(Phase.DECODE, 1, 1000.0)
# The paper's way to vote and its prefetch of gate matrices, with prefetch always on.
PAPER = {"prefetch": "on", "agree": "mol", "prefetch_kinds": 1}
GATES, UPS, DOWNS = 1 << GATE, 1 << UP, 1 << DOWN

# One token: the experts that layers 0 to 2 use, and each one's predictions for the next three
# layers, nearest layer first.
USED = [[0, 1, 2, 3], [4, 5, 6, 9], [2, 4, 6, 8]]
AHEAD = [
    [[4, 5, 6, 7], [2, 4, 8, 9], [1, 2, 3, 4]],
    [[8, 4, 2, 1], [3, 2, 1, 0], [0, 1, 2, 3]],
    [[2, 3, 9, 1], [5, 6, 7, 8], [9, 8, 7, 6]],
]


def firm(tuned=None, budget=None, **settings):
    asked = FIRM.Settings(**{**PAPER, "votes": "4,3", **settings})
    budget = SHAPE.all_slot_bytes() if budget is None else budget
    return policy_of(FIRM, SHAPE, asked, budget=budget, tuned=tuned)


def make(layer, ids, ahead, step=7):
    """Decode event. ids: [T, k]; ahead: [A, T, k], with falling scores."""
    rows, predicted = np.array(ids, np.int32), np.array(ahead, np.int32)
    n = len(rows)
    scores = np.broadcast_to(np.array([0.4, 0.2, 0.1, 0.05], np.float32), predicted.shape).copy()
    event = RouteEvent(
        *(rows, np.ones(rows.shape, np.float32), np.arange(n, dtype=np.int32)),
        *(predicted, scores, np.zeros(n, np.float32)),
        *(np.ones(n, np.uint8), np.zeros(n, np.int32)),
    )
    event.layer, event.n_tokens, event.n_ahead, event.step = layer, n, len(predicted), step
    return event


def asked(policy, event, here=()):
    """Requested prefetches as (layer, expert, tier, kinds), in order. here: experts that are
    resident in every layer."""
    resident = np.full((SHAPE.n_layers, SHAPE.n_expert), ABSENT, np.uint8)
    resident[:, list(here)] = 0
    out = make_decision(SHAPE)
    policy.decide(event, make_view(SHAPE, resident), out)
    assert not out.tier_array.any()
    return prefetches(out)


def token(policy, step=7, here=()):
    """Prefetches of one token in layers 0 to 2."""
    return [
        asked(policy, make(layer, [USED[layer]], [[row] for row in AHEAD[layer]], step), here)
        for layer in range(3)
    ]


@pytest.mark.parametrize(
    ("kinds", "wanted"), [(1, [GATES]), (2, [GATES, UPS]), (3, [0])], ids=["gate", "up", "whole"]
)
def test_gates_come_before_ups(kinds, wanted):
    """Gate matrices of all experts are requested before up matrices.

    Layer 1 gets the votes of layer 0 alone, layer 2 those of layers 0 and 1, which agree on 8, 4
    and 2.
    """
    found = token(firm(prefetch_kinds=kinds))
    assert found[0] == [(1, e, 0, mask) for mask in wanted for e in (4, 5, 6, 7)]
    assert found[1] == [(2, e, 0, mask) for mask in wanted for e in (8, 4, 2)]
    assert found[2] == [(3, e, 0, mask) for mask in wanted for e in (2, 3, 1)]


@pytest.mark.parametrize("agree", ["mol", "rank", "margin"])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_steps_without_counting_request_the_same(agree, kinds):
    votes = "3,2/2,1/3,2" if agree == "mol" else "3,1/2,1/3,1"
    policy = firm(agree=agree, prefetch_kinds=kinds, votes=votes)
    first = token(policy, 0)
    assert all(first)
    for step in range(1, 5):
        policy.on_step(STEP_DONE)
        assert policy.tuner.counts == (step == 4)
        assert token(policy, step) == first


@cases(
    "agree, votes, expected",
    ("mol", "1,1/3,2/4,3", [[4], [8, 4, 2], [2, 3]]),
    ("rank", "2,1", [[4, 5], [8, 4], [2, 3]]),
    ("margin", "2,1", [[4, 5, 6], [8, 4, 2], [2, 3, 9]]),  # scores of at least 2 * 0.05
)
def test_each_way_to_agree_prefetches_its_candidates(agree, votes, expected):
    """Each group of layers has its own votes: layer 1 is shallow, layers 2 and 3 are middle."""
    found = token(firm(agree=agree, votes=votes))
    assert [[expert for _, expert, *_ in each] for each in found] == expected


def test_votes_end_with_their_step():
    policy = firm()
    asked(policy, make(0, [USED[0]], [[row] for row in AHEAD[0]], 7))
    found = asked(policy, make(1, [USED[1]], [[row] for row in AHEAD[1]], 8))
    # layer 0's vote was for another step
    assert [expert for _, expert, *_ in found] == [8, 4, 2, 1]


def test_predictions_of_several_tokens_are_united():
    """Votes are intersected for each token, and the results of the tokens are united."""
    policy = firm(votes="3,2")
    two = [[0, 1, 2, 3], [4, 5, 6, 7]]
    first = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]]
    second = [[[4, 3, 2, 1], [5, 9, 3, 7]], [[0, 1, 2, 3], [0, 1, 2, 3]]]
    asked(policy, make(0, two, first))
    found = asked(policy, make(1, two, second))
    assert [expert for _, expert, *_ in found] == [3, 2, 5]
    assert policy.report()["recall"] == [None] * 6  # accuracy is counted in steps of one token only
    rows = [[0, 1, 2, 3]] * 9
    assert asked(policy, make(0, rows, [rows], 8)) == []
    assert len(asked(policy, make(0, rows[:8], [rows[:8]], 8))) == 3


def test_the_report_has_accuracy_and_loss():
    """Prediction accuracy of layers 1 and 2.

    Layer 1: 4 5 6 7 were predicted and 4 5 6 9 used, so recall and precision are 3/4. Layer 2: 8 4
    2 were predicted and 2 4 6 8 used.
    """
    policy = firm()
    token(policy, here=(5, 6, 2, 9))
    found = policy.report()
    assert found["recall"][1:3] == [0.75, 0.75]
    assert found["precision"][1:3] == [0.75, 1.0]
    assert found["size"][1:3] == [4.0, 3.0]
    # Layer 1: 7 is prefetched in vain, 9 is missed but resident. Layer 2: nothing is prefetched in
    # vain, and the missed 6 is resident.
    assert found["loss"] == {"shallow": 0.5, "middle": 0.0, "deep": None}
    assert found["votes"] == {group: [4, 3] for group in ("shallow", "middle", "deep")}
    assert found["tuned"] and found["prefetch"] == "on"


def test_tuning_finds_the_best_votes():
    """The first two candidates for layer 1 are always used and the others never, so K falls to 2
    there. In other groups every number of votes gives the same result, so one layer suffices."""
    policy = firm(votes=None, tune_steps=4, tune_tokens=8)
    assert policy.report()["votes"]["shallow"] == [4, 3]
    for step in range(8):
        asked(policy, make(0, [USED[0]], [[[4, 5, 7, 8]]] * 3, step))
        asked(policy, make(1, [[4, 5, 6, 9]], [[[2, 3, 4, 5]]] * 3, step))
        asked(policy, make(2, [[2, 3, 4, 5]], [[[2, 3, 4, 5]]] * 3, step))
        policy.on_step(STEP_DONE)
    found = policy.report()
    assert found["tuned"] and found["votes"] == {
        "shallow": [2, 1],
        "middle": [4, 1],
        "deep": [4, 3],
    }
    assert policy.learned().tuned == TUNED | {"votes": "2,1/4,1/4,3"}


# The result of a run with PAPER's settings and slots for all experts.
TUNED = {
    "votes": "2,1/4,2/3,1",
    "slots": 96,
    "agree": "mol",
    "prefetch_kinds": 1,
    "n_ahead": 3,
    "waste_weight": 0.5,
    "miss_weight": 0.5,
    "tune": "all",
}


def test_tuned_votes_are_the_start_of_the_next_run():
    policy = firm(TUNED, votes=None)
    assert policy.wants.n_ahead == 2 and policy.report()["tuned"]
    assert policy.settings.votes == "2,1/4,2/3,1"  # recorded in a trace
    odd = ({"slots": 50}, {"votes": "x"}, {"votes": 3}, {"slots": None}, {"votes": "5,1"})
    for other in (*odd, {"votes": "2,4"}, *({name: None} for name in TUNED)):
        policy = firm(TUNED | other, votes=None)
        assert policy.wants.n_ahead == 3 and not policy.report()["tuned"], other
    assert firm(votes=None).learned().tuned is None  # nothing is tuned yet


@cases(
    "asked_for",
    {"waste_weight": 1.0},
    {"miss_weight": 0.25},
    {"prefetch_kinds": 2},
    {"agree": "rank"},
    {"n_ahead": 4},
    {"tune": "climb"},
    {"tune": "off"},
    {"votes": "4,3"},
)
def test_votes_tuned_for_other_settings_are_not_used(asked_for):
    asked = {"votes": None, **asked_for}
    assert firm(TUNED, **asked).settings == firm(**asked).settings


def test_given_or_recalled_votes_are_not_saved():
    """Only votes that this run tuned are saved. Otherwise a pair that was given once as an option
    would become the start of all later runs."""
    asked_for, recalled = firm(votes="1,1"), firm(TUNED, votes=None)
    for policy in (asked_for, recalled):
        for step in range(5):
            token(policy, step)
            policy.on_step(STEP_DONE)
        assert policy.report()["tuned"] and policy.learned().tuned is None


@cases(
    "settings, said",
    (
        {"agree": "rank", "votes": "4,3"},
        "'votes' cannot be '4,3': P, the second number of a pair K,P, must be 1, not 3, unless "
        "the setting 'agree' is mol",
    ),
    (
        {"agree": "margin", "votes": "4,1/4,2/4,1"},
        "P, the second number of a pair K,P, must be 1, not 2",
    ),
    (
        {"agree": "rank", "n_ahead": 3, "votes": None},
        "'n_ahead' must be at most 1, not 3, unless the setting 'agree' is mol",
    ),
    ({"votes": "4,5"}, "P, the second number of a pair K,P, must be at most 4, not 5"),
    (
        {"votes": "4,3", "n_ahead": 1},
        "'n_ahead' must be 3, not 1, to fit the setting 'votes' .4,3.",
    ),
    (
        {"votes": "4,1", "n_ahead": 3},
        "'n_ahead' must be 1, not 3, to fit the setting 'votes' .4,1.",
    ),
    ({"tune": "climb"}, "'tune' has no effect, because the setting 'votes'"),
    ({"tune": "all"}, "'tune' has no effect, because the setting 'votes'"),
    ({"prefetch": "off"}, "'votes' has no effect without prefetching .prefetch is off."),
    (
        {"votes": None, "n_ahead": 0, "tune": "climb"},
        "'tune' has no effect without prefetching .n_ahead is 0.",
    ),
    ({"votes": "5,1"}, "K, the first number of a pair, must be at most 4"),
)
def test_settings_without_effect_are_refused(settings, said):
    with pytest.raises((SettingError, PolicyError), match=said):
        firm(**settings)


def test_as_many_layers_look_ahead_as_vote():
    votes = ("4,4", "4,1/4,2/4,1", "4,1", None)
    assert [firm(votes=each).wants.n_ahead for each in votes] == [4, 2, 1, 3]
    assert firm(tune="off", votes="4,2").wants.n_ahead == 2


def test_without_prefetch_nothing_is_asked_for():
    policy = firm(prefetch="off", votes=None)
    assert policy.wants.n_ahead == 0 and policy.report()["prefetch"] == "off"
    assert asked(policy, make(0, [USED[0]], [[row] for row in AHEAD[0]])) == []


def test_a_recorded_run_with_other_votes():
    """A recorded run replayed with other settings drops the recorded votes, and its look-ahead
    follows the new settings or the trace."""
    Settings = FIRM.Settings
    recorded = Settings(agree="mol", votes="4,3", n_ahead=3, prefetch_kinds=1).as_dict()
    assert Settings.changed(recorded, {}).with_usual() == Settings.of(recorded)
    for changes, n_ahead in (
        ({"agree": "rank"}, 1),
        ({"votes": "4,1"}, 1),
        ({"tune": "climb"}, 3),
        ({"n_ahead": 2}, 2),
        ({"prefetch": "off"}, 3),
    ):
        found = Settings.changed(recorded, changes).with_usual()
        assert (found.prefetch_kinds, found.n_ahead) == (1, n_ahead), changes
        assert found.votes == changes.get("votes"), changes
    assert Settings.changed(recorded, {"waste_weight": 2.0}).votes == "4,3"
    assert Settings.of(recorded).limited(0, ()).votes is None
    assert Settings.of(recorded).limited(3, ("votes",)).votes == "4,3"
    with pytest.raises(ConfigError, match="--votes 4,3 needs predictions for 3 layers ahead"):
        Settings.of(recorded).limited(1, ("votes",))


@pytest.mark.parametrize(("kinds", "missed"), [(1, 0), (2, 1), (3, 2)])
def test_the_loss_counts_the_matrices_that_are_fetched(kinds, missed):
    """The loss counts matrices, for one to three prefetched kinds n.

    Expert 4 is predicted but not used, and its up and down are resident: reading its gate is wasted
    (1/n). Expert 9 is used but not predicted, and its gate is resident: its up and down are read on
    demand. Experts 5 and 6 are predicted and used. Expert 7 is predicted and resident.
    """
    policy = firm(prefetch_kinds=kinds, votes="4,1", waste_weight=1.0, miss_weight=1.0)
    missing = np.zeros((SHAPE.n_layers, SHAPE.n_expert), np.uint8)
    missing[1, [4, 5, 6, 9]] = GATES, GATES | UPS | DOWNS, UPS, UPS | DOWNS
    view = StoreView(np.where(missing, ABSENT, 0).astype(np.uint8), missing)
    out = make_decision(SHAPE)
    policy.decide(make(0, [[0, 1, 2, 3]], [[[4, 5, 6, 7]]]), view, out)
    missing[1, [4, 5, 6]] = 0  # the prefetches have arrived
    policy.decide(make(1, [[5, 6, 9, 1]], np.zeros((0, 1, 4))), view, out)
    assert policy.report()["loss"]["shallow"] == pytest.approx((1 + missed) / kinds)


def test_prompts_and_slots_are_dymoes_with_one_precision():
    """FIRM has DyMoE's slots at every budget, and the same prefetches and streaming for a
    prompt."""
    for share in (0.2, 0.55, 1.0):
        budget = int(share * SHAPE.all_slot_bytes())
        ours = firm(budget=budget)
        theirs = policy_of(DyMoE, SHAPE, DyMoE.Settings(n_ahead=1), budget=budget)
        assert ours.placement.slots == theirs.placement.slots
        for layer in (0, 3, 4):
            event = make_event(SHAPE, np.random.default_rng(1), 12, layer, Phase.PREFILL, 1)
            resident = np.full((SHAPE.n_layers, SHAPE.n_expert), ABSENT, np.uint8)
            resident[:, ::3] = 0
            out = [make_decision(SHAPE), make_decision(SHAPE)]
            ours.decide(event, make_view(SHAPE, resident), out[0])
            theirs.decide(event, make_view(SHAPE, resident), out[1])
            assert prefetches(out[0]) == prefetches(out[1]) != []
            assert out[0].passing_array.tolist() == out[1].passing_array.tolist()
    least_of(FIRM, SHAPE)


def test_votes_as_a_text():
    assert read_votes("4,1") == [(4, 1)] * 3
    assert read_votes("4,1/8,3/8,2") == [(4, 1), (8, 3), (8, 2)]
    for text in ("4", "4,1/3,1", "0,1", "a,b", "4,1,2", "4,1/8,3/8,"):
        with pytest.raises(SettingError, match="give a pair K,P such as 4,1"):
            FIRM.Settings(votes=text)


# Predictions of three layers for one layer, nearest first: four candidates each, best first.
BALLOTS = [[5, 2, 7, 1], [2, 5, 9, 7], [7, 2, 4, 5]]
SCORES = [0.4, 0.2, 0.1, 0.05]


@cases(
    "way, candidates, n, expected",
    ("mol", 4, 1, [5, 2, 7, 1]),  # eq. 6, in the order of the nearest layer
    ("mol", 4, 2, [5, 2, 7]),
    ("mol", 4, 3, [5, 2, 7]),
    ("mol", 3, 2, [5, 2]),
    ("mol", 3, 3, [2]),  # 5 is only the third layer's fourth candidate
    ("mol", 1, 2, []),
    ("mol", 2, 4, [2]),  # only three layers vote
    ("rank", 3, 3, [5, 2, 7]),
    ("margin", 4, 1, [5, 2, 7, 1]),  # scores of at least 0.05
    ("margin", 3, 1, [5, 2, 7]),
    ("margin", 2, 1, [5, 2, 7]),  # scores of at least 0.1
    ("margin", 1, 1, [5, 2]),
)
def test_agreed_candidates(way, candidates, n, expected):
    assert agreed(way, BALLOTS, candidates, n, SCORES) == expected
    assert agreed(way, [], candidates, n) == []


HALF = Weights(0.5, 0.5, 1)


@cases(
    "n_layers, groups",
    (16, [0] * 5 + [1] * 7 + [2] * 4),  # five shallow and four deep layers, as in Figure 6
    (8, [0, 0, 0, 1, 1, 1, 2, 2]),
    (4, [0, 0, 1, 2]),
    (3, [0, 0, 2]),
    (2, [0, 0]),
)
def test_every_group_has_a_layer_that_can_be_predicted(n_layers, groups):
    assert group_of(n_layers) == groups


def test_every_pair_of_votes_is_counted_on_the_same_tokens():
    """Loss for each number of candidates K and of votes P, with no expert resident.

    First 5 and 2 are used. With K = 1, 5 is predicted and 2 is missed. P = 2 loses 5 at K = 1 and 7
    at K = 3.
    """
    made = Tuner("all", [0, 0], (3, 2), HALF, 1, 1, 12)
    sets = expected_sets("mol", [[5, 7, 2], [2, 5, 9]], 2)
    absent = [(mask_of(range(10)), 1)]
    made.count(1, sets, [5, 2], absent)
    assert made.means(0) == [[0.5, 1.0, 0.5], [1.0, 0.5, 0.0]]
    made.token()
    assert made.of(1) == (3, 2)
    made.count(1, sets, [7, 5], absent)  # mean over two tokens
    assert made.means(0) == [[0.5, 0.5, 0.5], [1.0, 0.5, 0.5]]
    made.token()
    assert made.of(1) == (1, 1)  # of equal losses, the one with the fewest layers and candidates


def climbed(means, n, patience=1):
    """(K, P) after each of n updates. means: [P - 1][K - 1]."""
    climb = Climb(len(means[0]), len(means), patience)
    path = []
    for _ in range(n):
        climb.update(means)
        path.append(climb.at)
    return path


@cases(
    "means, patience, end",
    ([[1.0, 0.5, 0.75], [1.0, 0.5, 0.75]], 1, (2, 2)),
    ([[1.0, 0.5, 0.75], [1.0, 0.5, 0.75]], 4, (3, 2)),  # patience delays a turn
    ([[0.5, 0.5]], 1, (2, 1)),  # a step out of range counts as a turn
    ([[0.1]], 1, (1, 1)),
)
def test_a_climb_turns(means, patience, end):
    assert climbed(means, 4, patience)[-1] == end


def test_a_climb_ends_at_the_smallest_mean_loss():
    """The climb ends at the (K, P) with the least mean loss.

    In two intervals one expert is used, and K falls from 3 to 1. In the third interval three are
    used, and it has three times the weight. So K = 3 is best, two steps away from the current K.
    """
    made = Tuner("climb", [0, 0, 1, 2], (3, 1), HALF, 4, 1, 12)
    sets = [[mask_of(range(1, n + 1)) for n in (1, 2, 3)]]
    for step in range(12):
        used, times = ([1], 1) if step < 8 else ([1, 2, 3], 3)
        assert made.counts == (step % 4 == 0) and not made.tuned
        for _ in range(times if made.counts else 0):
            made.count(1, sets, used, [(0b1110, 1)])
        made.token()
        assert made.of(1) == ((3, 1) if step in (0, 1, 2, 11) else (2, 1) if step < 7 else (1, 1))
    assert made.tuned
