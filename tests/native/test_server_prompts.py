"""Prompt copies within the memory plan, and answers that wait for a policy."""

import pytest

from orchestrator.events import Phase
from orchestrator.native import touched_memory
from orchestrator.runtime.answering import kept_prompts

from .servers import MIB, answered, broken, posted, serving, whole

COUNTRIES = ("Norway", "Peru", "Japan", "Kenya", "Spain", "Chile")
LRU = {"policy": "lru", "high_tier": "q4_k", "ram": 140 * MIB}
WAITS = {"policy": "context", "placement": "wait", "ram": 140 * MIB, "expert_ram": 16 * MIB}


def about(runtime, country):
    """Answer a prompt. Return (tokens read, text of the answer)."""
    # No prompt is a prefix of another.
    prompt = f"{country}! " * 40 + f"What is the capital of {country}?"
    answer = answered(runtime, prompt=prompt, max_tokens=4, ignore_eos=True)
    return answer["timings"]["prompt_n"], answer["choices"][0]["text"]


def test_a_long_conversation_evicts_copies_before_slots():
    """A long conversation takes the memory of prompt copies before that of slots.

    Copies may return after the long conversation.
    """
    with serving(**LRU | {"ram": 136 * MIB, "ctx": 1024, "cache_ram": 4 * MIB}) as runtime:
        driver, store = runtime.inside.driver, runtime.inside.store
        shared, most = driver.shared, 4 * MIB
        planned = sum(size * n for size, n in store.spec.groups)

        def kept():
            """Return the bytes of prompt copies.

            Check that slots, copies and touched memory fit the shared limit.
            """
            slots = store.stats().slot_bytes
            touched = sum(each.resident for each in touched_memory(store.library))
            assert slots >= 0.98 * (planned - most)  # the rest is uncounted scratch
            assert slots + touched + driver.prompts <= shared.n_bytes
            return driver.prompts

        for country in COUNTRIES:
            about(runtime, country)
        assert kept() > MIB
        long = answered(runtime, prompt="So it goes on, " * 180, max_tokens=1)
        assert long["timings"]["prompt_n"] > 880
        assert touched_memory(store.library).cache.resident > planned / 4
        assert kept() == 0
        assert about(runtime, COUNTRIES[0])[0] > 40
        about(runtime, COUNTRIES[1])
        assert about(runtime, COUNTRIES[0])[0] < 5
        assert kept() > 0


@pytest.mark.parametrize(
    ("n_bytes", "part", "parallel", "expected"),
    [
        (8 * MIB, 0, 1, (8, 0)),
        (0, 0, 1, (0, 0)),
        (0, MIB, 1, (0, 0)),
        (8 * MIB, MIB, 1, (4, 4)),
        (8 * MIB, MIB, 4, (4, 1)),
        (8 * MIB, MIB, 8, (8, 0)),
    ],
)
def test_copies_and_checkpoints_share_the_memory(n_bytes, part, parallel, expected):
    cache_mib, places = kept_prompts(n_bytes, part, parallel)
    assert (cache_mib, places) == expected
    assert cache_mib * MIB + places * part * parallel <= n_bytes


def test_an_answer_waits_for_its_placement(monkeypatch):
    with serving(**WAITS) as runtime:
        driver = runtime.inside.driver
        asked = []
        follow, wait = driver.follow, driver.before_answer
        waited = []

        def following(phase):
            asked.append(phase)
            follow(phase)

        def waiting():
            before = driver.store.states()[0].copy()
            wait()
            resident, target = driver.store.states()
            assert (resident == target).all()  # no transition is running when the answer begins
            waited.append(bool((resident != before).any()))

        monkeypatch.setattr(driver, "follow", following)
        monkeypatch.setattr(driver, "before_answer", waiting)
        about(runtime, "Norway")
        # A prompt of more than 64 tokens takes two steps, followed by one answer.
        assert asked[:2] == [Phase.PREFILL] * 2 and set(asked[2:]) == {Phase.DECODE}
        assert waited == [True]
        assert driver.report()["placements"] == 1


def test_a_policy_that_fails_before_an_answer_fails_that_answer(monkeypatch):
    with serving(**WAITS) as runtime:
        with monkeypatch.context() as patched:
            patched.setattr(runtime.inside.driver, "before_answer", broken)
            prompt = "Tell me about Norway, please."
            answer = posted(runtime, "/v1/completions", prompt=prompt, max_tokens=4)
            assert whole(answer)[0] == 500
            assert answer.failure() == "the policy failed: RuntimeError: no idea"
        assert about(runtime, "Norway")[1]
        assert answer.failure() is None
