"""Decisions of every policy on one stored run, in a few lines each:

    python tests/unit/replay/golden.py           # shows rows that differ from the stored ones
    python tests/unit/replay/golden.py --store   # stores the current rows

The run is invented and stored next to the decisions (golden/): prompts and answers of five
sequences, several of them in one step, with experts in three precisions. A row has a digest of all
decisions, prefetches and transitions, which shows whether anything changed, and sums that show what
changed.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.file.layout import DOWN, GATE, UP
from orchestrator.allocation.slots import Rules
from orchestrator.events import SKIP, Phase
from orchestrator.lab.replay.file import read_trace, write_trace
from orchestrator.lab.replay.simulate import Compute, Transport, foreseen, set_up, simulate
from orchestrator.lab.replay.trace import ENDS, PROMPT_ENDS, STARTS, Trace
from orchestrator.native.llama import Bindings
from orchestrator.policy import policy_class

FOLDER = Path(__file__).parent / "golden"
RUN, DECISIONS = FOLDER / "run.npz", FOLDER / "decisions.json"
TIERS = ("q8_0", "q4_k", "q2_k")
SKIP_NAME = "skip"
N_LAYERS, N_EXPERT, K, N_AHEAD = 6, 16, 4, 4
EXPERT_BYTES = (3 * 8192, 3 * 4096, 3 * 2048)
EVERY = N_LAYERS * N_EXPERT

# name of the row: (policy, tiers, budget as a share of all experts in the best of these tiers,
# settings).
ROWS: dict[str, tuple[str, tuple[str, ...], float, dict[str, Any]]] = {
    "lru": ("lru", ("q8_0",), 0.5, {}),
    "lru, all resident": ("lru", ("q4_k",), 1.0, {}),
    "dymoe": ("dymoe", ("q8_0",), 0.5, {"retention": 1.0}),
    "dymoe, small": ("dymoe", ("q4_k",), 0.3, {"retention": 1.0}),
    "dymoe 8/2": ("dymoe", ("q8_0", "q2_k"), 0.5, {"retention": 0.75}),
    "dymoe 4/2, half": ("dymoe", ("q4_k", "q2_k"), 0.6, {"retention": 0.5}),
    "dymoe 8/0": ("dymoe", ("q8_0", SKIP_NAME), 0.5, {"retention": 0.75}),
    "dymoe 8/4/0": ("dymoe", ("q8_0", "q4_k", SKIP_NAME), 0.5, {"retention": 0.75}),
    "dymoe 8/0, missing": (
        "dymoe",
        ("q8_0", SKIP_NAME),
        0.5,
        {"retention": 0.75, "lower_which": "missing"},
    ),
    "dymoe 8/2, no look-ahead": (
        "dymoe",
        ("q8_0", "q2_k"),
        0.5,
        {"retention": 0.75, "prefetch": "off"},
    ),
    "dynaexq 8/2": ("dynaexq", ("q8_0", "q2_k"), 0.6, {}),
    "dynaexq 4/2": ("dynaexq", ("q4_k", "q2_k"), 0.7, {}),
    "dynaexq 4/2, small": ("dynaexq", ("q4_k", "q2_k"), 0.4, {}),
    "mixed": ("mixed", TIERS, 0.6, {}),
    "mixed 8/4": ("mixed", ("q8_0", "q4_k"), 0.7, {}),
    "firm": ("firm", ("q8_0",), 0.5, {}),
    "firm, votes": ("firm", ("q8_0",), 0.5, {"votes": "3,2", "agree": "mol"}),
    "firm, climb": (
        "firm",
        ("q8_0",),
        0.5,
        {"tune": "climb", "agree": "mol", "tune_steps": 4},
    ),
    "firm, gates": ("firm", ("q4_k",), 0.4, {"prefetch_kinds": 1}),
    "context": ("context", TIERS, 0.6, {}),
    "context, shared": ("context", TIERS, 0.6, {"near_slots": "shared"}),
    "context, waits": ("context", TIERS, 0.6, {"placement": "wait"}),
    "floor": ("floor", ("q8_0", SKIP_NAME), 0.5, {"max_loss": 0.02}),
    "floor 8/2": ("floor", ("q8_0", "q2_k", SKIP_NAME), 0.5, {"max_loss": 0.02}),
    "floor, strict": ("floor", ("q4_k", SKIP_NAME), 0.4, {"max_loss": 0.002}),
}

# (phase, sequence of each token, (mark, sequence) of the report) for each step.
_Steps = list[tuple[Phase, list[int], list[tuple[int, int]]]]


def _steps():
    prompt, token = Phase.PREFILL, Phase.DECODE
    return [
        (prompt, [0] * 12, [(STARTS, 0)]),
        (prompt, [0] * 6, [(PROMPT_ENDS, 0)]),
        *[(token, [0], [])] * 12,
        (prompt, [1] * 7 + [0], [(STARTS, 1), (PROMPT_ENDS, 1)]),
        *[(token, [0, 1], [])] * 10,
        (
            prompt,
            [2] * 5 + [1] + [3] * 6,
            [(ENDS, 0), (STARTS, 2), (STARTS, 3), (PROMPT_ENDS, 2), (PROMPT_ENDS, 3)],
        ),
        *[(token, [1, 2, 3], [])] * 12,
        (prompt, [4] * 9, [(ENDS, 1), (ENDS, 2), (ENDS, 3), (STARTS, 4), (PROMPT_ENDS, 4)]),
        *[(token, [4], [])] * 16,
    ]


def make_run(seed=20261125):
    """Return the run that is stored.

    Each sequence prefers other experts, half of the predictions are right, and losses of tiers
    differ between experts.
    """
    from traces import decode

    rng = np.random.default_rng(seed)
    steps = _steps()
    odds = rng.dirichlet(np.full(N_EXPERT, 0.4), (5, N_LAYERS)) + 0.01
    odds /= odds.sum(axis=2, keepdims=True)

    def chosen(of, layer):
        rows = [rng.choice(N_EXPERT, K, replace=False, p=odds[each, layer]) for each in of]
        return np.stack(rows).astype(np.uint16)

    def falling(n):
        gates = -np.sort(-rng.dirichlet(np.ones(K), n), axis=1)
        return gates.astype(np.float32)

    rows: dict[str, list[np.ndarray]] = {
        name: []
        for name in (
            *("ids", "weights", "tokens", "phases", "sequences"),
            *("ahead_ids", "ahead_scores", "importance"),
        )
    }
    events, marks, answering = [], [], set()
    for number, (phase, of, said) in enumerate(steps):
        n = len(of)
        phases = [Phase.DECODE if each in answering else Phase.PREFILL for each in of]
        answering |= {sequence for what, sequence in said if what == PROMPT_ENDS}
        by_layer = [chosen(of, layer) for layer in range(N_LAYERS)]
        for layer, ids in enumerate(by_layer):
            ahead = [
                by_layer[layer + 1 + p] if rng.random() < 0.5 else chosen(of, layer + 1 + p)
                for p in range(min(N_AHEAD, N_LAYERS - 1 - layer))
            ]
            scored = phase is Phase.PREFILL
            events.append((number, layer, n, len(ahead), scored, len(np.unique(ids))))
            rows["ids"].append(ids)
            rows["weights"].append(falling(n))
            rows["tokens"].append(np.arange(n, dtype=np.int32))
            rows["phases"].append(np.array(phases, np.uint8))
            rows["sequences"].append(np.array(of, np.int32))
            rows["ahead_ids"] += ahead
            rows["ahead_scores"] += [falling(n) for _ in ahead]
            if scored:
                rows["importance"].append(rng.dirichlet(np.ones(n)).astype(np.float32))
        marks += [(number, what, sequence) for what, sequence in said]
    columns = np.array(events)
    made = decode([[0]] * N_LAYERS, n_expert=N_EXPERT)
    header = replace(made.header, model="golden", n_expert_used=K, tiers=TIERS, in_use=TIERS[:1])
    slices = np.zeros((N_LAYERS, 4, len(TIERS), 4), np.int64)
    slices[..., 0] = -1
    offset = 0
    for tier, whole in enumerate(EXPERT_BYTES):
        for layer in range(N_LAYERS):
            for kind in (UP, GATE, DOWN):
                slices[layer, kind, tier] = 0, offset, whole // 3, 12
                offset += whole // 3 * N_EXPERT
    each = rng.uniform(0.001, 0.02, (N_LAYERS, N_EXPERT, len(TIERS) + 1))
    lost = np.cumsum(each * (1, 1, 2, 20), axis=2)
    arrays = {
        **made.arrays,
        **{name: np.concatenate(values) for name, values in rows.items()},
        "slices": slices,
        "start_hotness": rng.random((N_LAYERS, N_EXPERT)),
        "losses": lost[..., :-1],
        "costs": lost,
        "step_phase": np.array([phase for phase, *_ in steps], np.uint8),
        "step_tokens": np.array([len(of) for _, of, _ in steps], np.int32),
        "marks": np.array(marks, np.int32),
        "event_step": columns[:, 0].astype(np.int32),
        "event_layer": columns[:, 1].astype(np.int16),
        "event_tokens": columns[:, 2].astype(np.int32),
        "event_ahead": columns[:, 3].astype(np.uint8),
        "event_scored": columns[:, 4].astype(np.uint8),
        "event_computed": columns[:, 5].astype(np.int32),
        "event_ns": 60_000 * columns[:, 2].astype(np.int64),
        "event_wait_us": np.zeros(len(columns), np.int64),
    }
    return Trace(header, arrays)


class Listener:
    """Records the decisions and transitions of a policy."""

    def __init__(self, policy):
        self._digest = hashlib.sha256()
        self._tiers = [*policy.shape.tiers]
        self.sums: Counter[str] = Counter()
        self._decide, self._warm, self._told = policy.decide, policy.warm, policy.on_step
        policy.decide, policy.warm, policy.on_step = self.decide, self.warm, self.on_step

    @property
    def digest(self):
        return self._digest.hexdigest()[:16]

    def _note(self, *what):
        self._digest.update(repr(what).encode())

    def decide(self, event, view, out):
        self._decide(event, view, out)
        ids = sorted(set(event.ids_array.ravel().tolist()))
        tiers = [int(out.tier_array[each]) for each in ids]
        ahead = list(out._prefetch[: out.n_prefetch])
        passing = [int(out.passing_array[each]) for each in ids]
        self._note(event.step, event.layer, ids, tiers, passing, ahead, out.renormalize)
        for tier in tiers:
            self.sums[SKIP_NAME if tier == SKIP else self._tiers[tier]] += 1
        self.sums["passing"] += sum(passing)
        self.sums["prefetched"] += len(ahead)

    def _moved(self, moves):
        self._note(list(moves))
        self.sums["moved"] += len(moves)
        return moves

    def warm(self, *states):
        moves = self._warm(*states)
        return None if moves is None else self._moved(moves)

    def on_step(self, report):
        return self._moved(self._told(report))


def decided(library, trace, row):
    """One row: the digest and the sums."""
    name, tiers, share, settings = ROWS[row]
    policy = policy_class(name)
    in_use = tuple(TIERS.index(each) for each in tiers if each != SKIP_NAME)
    budget = int(share * EVERY * EXPERT_BYTES[in_use[0]])
    rules = Rules(skip=SKIP_NAME in tiers)
    estimate = foreseen(trace, in_use, None)
    asked = policy.Settings.of(settings)
    setup = set_up(trace, policy, budget, asked, in_use, rules, threads=2, estimate=estimate)
    listener = Listener(setup.policy)
    outcome = simulate(library, trace, setup, Transport(4096 * 10**5, 20, 2), Compute(60.0, 60.0))
    stats = outcome.stats
    moved = {"hits": sum(stats.hits), "read": sum(stats.demand_bytes) + sum(stats.prefetch_bytes)}
    return {"digest": listener.digest, **dict(sorted(listener.sums.items())), **moved}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", action="store_true", help="store the decisions of now")
    parser.add_argument("--make-run", action="store_true", help="make the run anew, too")
    asked = parser.parse_args()
    library = Bindings.load().library()
    if asked.make_run:
        FOLDER.mkdir(exist_ok=True)
        write_trace(RUN, make_run())
    trace = read_trace(RUN)
    found = {row: decided(library, trace, row) for row in ROWS}
    if asked.store:
        lines = [f"{json.dumps(row)}: {json.dumps(found[row])}" for row in found]
        DECISIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    stored = json.loads(DECISIONS.read_text())
    changed = [row for row in found if found[row] != stored.get(row)]
    for row in changed:
        print(f"{row}:\n  was {stored.get(row)}\n  is  {found[row]}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
