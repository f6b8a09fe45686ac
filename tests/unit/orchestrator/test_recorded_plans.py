"""Plans equal the recorded ones."""

from itertools import islice

from recorded_plans import SAMPLE, differences, outcome, read, sample


def test_plans_are_as_recorded():
    """Plans equal the recorded ones for a sample of the grid in `tests/helpers/recorded_plans.py`.
    If plans change on purpose, that file says how to record them again."""
    stored, inputs = read(SAMPLE), sample()
    assert [{k: v for k, v in row.items() if k != "is"} for row in stored] == inputs
    found = {row["row"]: differences(row["is"], outcome(row)) for row in stored}
    assert {row: each for row, each in found.items() if each} == {}


def test_the_sample_has_every_kind_of_outcome():
    kinds = {key for row in read(SAMPLE) for key in row["is"]}
    assert {"refused", "error", "slots", "shared", "starts", "mix"} <= kinds
    assert len(list(islice(read(SAMPLE), 100))) == 100
