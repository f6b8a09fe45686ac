"""A policy is one file and one line in the registry. Options, help, checks, traces and replay
follow from its declaration.

The policy of this test has one setting. It differs from the existing ones: it needs three
precisions, decides in prefill only, receives the tier of each expert, and moves one expert through
all tiers.
"""

import json

import pytest
from command_line import python
from tables import cases

from orchestrator.lab.replay import read_trace

POLICY = '''
"""The tier of an expert follows from its index."""

from dataclasses import dataclass

from orchestrator.allocation.slots import SlotGroup, SlotPlan
from orchestrator.events import Phase
from orchestrator.policy.base import About, Placement, Policy, Precisions, PolicyRequirements
from orchestrator.settings import Settings, setting


@dataclass(frozen=True)
class StripesSettings(Settings):
    stripe: int = setting(2, "Number of neighbouring experts that share a tier.", within=(1, 9),
                          live=True)


class StripesPlacement(Placement):
    @property
    def text(self):
        return f"stripes of {self.settings.stripe} in {'/'.join(self.shape.tiers)}"

    def first(self, hotness=None):
        return [(layer, expert, 2) for layer in range(self.shape.n_layers)
                for expert in range(self.shape.n_expert)]


class Stripes(Policy):
    about = About(
        name="stripes",
        summary="experts by their index",
        Settings=StripesSettings,
        reason="uses the index only",
        precisions=Precisions(least=3, most=3),
        wants=PolicyRequirements((Phase.PREFILL,), default_tier=2, counts=True, states=True),
    )
    seen = None

    @classmethod
    def place(cls, shape, settings, rules, budget_bytes, history):
        groups, group_of = [], {}
        for tier in range(len(shape.tiers)):
            for layer in range(shape.n_layers):
                for kind, size in shape.slots[layer][tier].items():
                    group_of[layer, kind, tier] = len(groups)
                    groups.append(SlotGroup(size, shape.n_expert))
        slots = SlotPlan(tuple(groups), group_of)
        return StripesPlacement(cls, shape, settings, rules, slots, cls.about.wants)

    def decide(self, event, view, out):
        assert event.phase == 0 and set(event.phases_array.tolist()) == {0}
        assert set(event.sequences_array.tolist()) == {0}
        for expert in set(event.ids_array.ravel().tolist()):
            out.tier[expert] = expert // self.settings.stripe % len(self.shape.tiers)

    def on_step(self, report):
        """Count reports. With wide stripes, the first expert moves through all tiers."""
        seen = self.seen or dict(starts=[], prompts=0, decoded=0, first=[])
        self.seen = seen
        seen["starts"] += report.starts
        seen["prompts"] += len(report.prompt_ends)
        seen["decoded"] += int(report.counts.sum()) * (report.phase == 1)
        seen["first"].append(int(report.resident[0, 0]))
        moving = report.target[0, 0] != report.resident[0, 0]
        if self.settings.stripe < 3 or report.phase == 0 or moving:
            return ()
        return [(0, 0, (int(report.resident[0, 0]) + 1) % 3)]

    def report(self):
        return self.seen or {}
'''
# The line of the registry, added by the start-up code of a separate process.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import stripes
from orchestrator import policy
policy.POLICIES["stripes"] = stripes.Stripes
from orchestrator.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    (folder / "stripes.py").write_text(POLICY)
    return folder


@pytest.fixture
def model(library, tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k")


def moe_edge(folder, *args):
    return python("-c", PROGRAM, folder, *args)


def test_options_and_help_of_a_new_policy(folder):
    said = " ".join(moe_edge(folder, "chat", "--help-all").stdout.split())
    assert "lru, dymoe, dynaexq, firm, context, floor, mixed, stripes, plain" in said
    assert "Policy stripes: --stripe N Number of neighbouring experts that share a tier." in said
    assert "[default: 2]" in said
    said = " ".join(moe_edge(folder, "replay", "--help-all").stdout.split())
    assert "--stripe N" in said and "stripes" in said


@cases(
    "options, said",
    ("--policy stripes --stripe 10", "'--stripe': must be 1 to 9, not 10"),
    ("--policy lru --stripe 3", "--stripe has no effect with --policy lru, which runs one"),
    ("--policy stripes --retention 0.5", "--policy stripes, which uses the index only"),
    ("--policy stripes --high-tier q4_k", "stripes needs at least 3 precisions: give --low FILE"),
    ("--stripe 3", "--stripe is for --policy stripes: leave it out"),
)
def test_checks_of_a_new_policy(folder, model, options, said):
    done = moe_edge(folder, "chat", "-m", model, "-p", "hello", *options.split())
    assert done.returncode in (1, 2) and done.stdout == "" and said in done.stderr


def test_status_line_and_tier_fractions_of_a_new_policy(folder, model):
    done = moe_edge(
        *(folder, "chat", "-m", model, "-p", "hello there", "--json", "--seed", 5),
        *("--policy", "stripes", "--stripe", 3, "--max-tokens", 100, "--expert-ram", "64MiB"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    stats = json.loads(done.stdout)["stats"]
    assert stats["mode"].startswith("managed: stripes of 3 in q8_0/q4_k/q2_k, ")
    assert set(stats["mix"]) == {"q8_0", "q4_k", "q2_k"}
    assert all(share > 0 for share in stats["mix"].values())
    assert sum(stats["computed"].values()) == pytest.approx(1.0)
    # One sequence started and its prompt ended. Decode steps are counted although the policy does
    # not decide in them.
    reported = stats["policy"]
    assert reported["starts"] == [0] and reported["prompts"] == 1
    assert reported["decoded"] > 0 and stats["callback_us_p50"] > 0
    assert set(reported["first"]) == {0, 1, 2}  # by transitions between any two tiers


def test_trace_and_replay_of_a_new_policy(folder, model, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "t.npz"
    text.write_text("a text of some words, " * 20)
    done = moe_edge(
        *(folder, "trace", "-m", model, "--text", text, "--tokens", 24, "--prefill", 8),
        *("--out", out, "--policy", "stripes", "--stripe", 1, "--expert-ram", "64MiB"),
        *("--ctx", 128, "--threads", 1),
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(Exception, match="unknown policy 'stripes'"):
        read_trace(out)  # this process's registry does not have the policy
    for options, pattern, same in (((), "of 1", True), (("--stripe", "2"), "of 2", False)):
        done = moe_edge(folder, "replay", out, "--json", *options)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["policy"] == f"stripes {pattern} in q8_0/q4_k/q2_k"
        if same:
            ours, theirs = found["runs"]["stripes"]["decode"], found["recorded"]["decode"]
            assert (ours["hits"], ours["mix"]) == (theirs["hits"], theirs["mix"])
    damaged = moe_edge(folder, "replay", out, "--stripe", "0")
    assert "'--stripe': must be 1 to 9, not 0" in damaged.stderr
