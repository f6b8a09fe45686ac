"""Few bits for near experts: which tiers they may have."""

from orchestrator.lab.study.near_data import near_tiers


def test_near_tiers_are_one_of_each_width():
    five = near_tiers(("q8_0", "q4_k", "q3_k", "iq3_xxs", "q2_k"))
    assert list(five.items()) == [(4, "q4_k"), (3, "q3_k"), (2, "q2_k")]
    assert five.get(3.0) == "q3_k" and five.get(2.5) is None
