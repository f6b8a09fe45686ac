"""Bit-for-bit tests of every supported Mixture-of-Experts architecture.

Upstream's own test creates most models, `make_models.cpp` some more. With managed experts, logits
equal those of llama.cpp's own path.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import unpatched
from answering import answered, evaluated, first_logits
from killing import calls_of, killed
from repacking import repack

from gguf_tools.errors import NotMoEError
from gguf_tools.experts import PROVEN, ExpertModel
from gguf_tools.file.layout import DOWN
from gguf_tools.pack import export, pack
from orchestrator.errors import BudgetError, NativeError
from orchestrator.events import Phase
from orchestrator.lab.calibrate.methods import Method
from orchestrator.lab.calibrate.table import measure_losses
from orchestrator.lab.eval.arithmetic import kl_divergence
from orchestrator.native import host_memory, touched_memory
from orchestrator.plan.records import CELL_STEP
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.evaluator import log_softmax
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, greedy, opened, run_program, until
from .lookup_table import BLOCK, blocks_of, forget, read_bytes, widen
from .replayed import SPEEDS, recorded, replayed

HERE = Path(__file__).parent
# Architectures that upstream's test lists as Mixtures of Experts, but that we cannot manage.
NO_EXPERTS = ("ernie4_5", "paddleocr")  # no expert tensors
NOT_COMPUTED = ("refact",)  # llama.cpp's graph computes another product instead
DIFFUSION = ("llada-moe", "rnd1")
EXCEPTIONS = {*NO_EXPERTS, *NOT_COMPUTED, *DIFFUSION}
PROMPT, ANSWER, OTHER = ([each % 128 for each in drawn(n, n)] for n in (40, 32, 50))
N_DECODE = 6
CALIBRATED = 512
AT_ONCE = {"ctx": 256, "ubatch": 256, "logits_all": True}  # one batch, as in the unpatched library
# the process is killed at calls in this module
COPIES_MODULE = "orchestrator.runtime.prompt_copies"
POLICIES = (
    {"policy": "lru"},
    {"policy": "dymoe", "prefetch": "on", "low_tier": "skip", "retention": 1.0},
)
# (experts, experts per token, layers, weights in a row of an expert). AS_UPSTREAM: upstream's
# sizes, where every token uses all experts. STREAMED: experts are evicted and loaded. WIDER: rows
# for types with blocks of 256 weights.
AS_UPSTREAM, STREAMED, WIDER = (2, 2, 0, 0), (8, 2, 4, 0), (16, 4, 4, 256)
# Layers that choose experts by token id, if the architecture has such layers.
N_BY_TOKEN = 2
NEWEST = (
    *("gemma4", "qwen4exp", "deepseek4", "deepseek32", "glm-dsa", "glm5-next", "hy_v3", "kimi-k3"),
    *("kimi-linear", "minimax-m3", "llama4", "mistral4", "step35", "mimo2", "lfm2moe"),
)
UNPATCHED = unpatched.find()


@pytest.fixture(scope="module")
def maker(compile_native, llama_source):
    """Upstream's test program with our main function."""
    places = (HERE / "archs", *(llama_source / each for each in ("tests", "src", "vendor")))
    flags = ("-std=c++17", "-w", "-O1", "-g0", *(f"-I{each}" for each in places))
    return compile_native("make_models", [HERE / "archs" / "make_models.cpp"], *flags)


@pytest.fixture
def make(maker, tmp_path):
    """make(architecture, size, n_by_token): path of a model."""

    def made(arch, size=STREAMED, n_by_token=N_BY_TOKEN):
        run_program(maker, arch, tmp_path, *size, n_by_token)
        return tmp_path / f"{arch}.gguf"

    return made


def options(**more):
    return {"ctx": 128, "ubatch": 32, "threads": 1, "use_extra_bufts": False, **more}


def logits(e):
    rows = greedy(e, PROMPT, N_DECODE)
    assert np.isfinite(rows).all()
    if e.inside.managed:
        e.inside.store.check()
    return rows


def plain_logits(model):
    with opened(model, **options()) as runtime, runtime.evaluator() as e:
        assert not e.inside.managed
        return logits(e)


def smallest_budget(model, **more):
    with pytest.raises(BudgetError) as refused:
        opened(model, **options(**more, expert_ram=1))
    return refused.value.needed_bytes


def compared(model):
    """Check that logits equal those of llama.cpp's own path, bit for bit.

    Each policy gets the fewest slots with which it works. Return the statistics of the last policy.
    """
    expected = plain_logits(model)
    for policy in POLICIES:
        least = smallest_budget(model, **policy)
        with (
            opened(model, **options(**policy, expert_ram=least)) as runtime,
            runtime.evaluator() as e,
        ):
            np.testing.assert_array_equal(logits(e), expected, err_msg=str(policy))
            stats = e.inside.store.stats()
            assert min(stats.requests) > 0
    return stats


def test_every_architecture_is_listed(maker):
    assert set(run_program(maker).split()) == set(PROVEN) | EXCEPTIONS


@pytest.mark.parametrize("arch", PROVEN)
def test_bit_for_bit(arch, make):
    """Logits equal those of llama.cpp's own path.

    Look-ahead prefetches experts if it is supported.
    """
    for size in (AS_UPSTREAM, STREAMED):
        stats = compared(make(arch, size))
    # if tokens choose among experts, the look-ahead prefetches some
    assert (sum(stats.prefetch_bytes) > 0) == (not PROVEN[arch])


def test_a_layer_that_uses_fewer_experts(make, tmp_path):
    """A layer that uses fewer experts than the others has correct logits and events.

    `event.k` is the layer's own number of experts. A replay of its trace routes the same. With all
    experts resident in the low tier, dynaexq promotes experts of this layer too.
    """

    def fewer(model):
        with ExpertModel.open(model) as file:
            used = [file.n_expert_used] * file.hparams.block_count
            used[file.layer_ids[-1]] = 1
        return repack(model, tmp_path / "fewer.gguf", expert_used_count=used)

    compared(fewer(make("nemotron_h_moe")))
    packed = tmp_path / "packed.gguf"
    pack(fewer(make("nemotron_h_moe", (16, 4, 4, 0))), packed, ["q8_0", "q4_0"])
    seen = set()

    def with_report(e):
        decide = e.inside.policy.decide

        def decided(event, view, out):
            decide(event, view, out)
            ids, weights, one = event.ids_array, event.weights_array, event.n_tokens == 1
            assert ids.shape == weights.shape == (event.n_tokens, event.k) and (weights > 0).all()
            assert event.ids.tolist() == ids[0].tolist() and len(event.weights) == event.k
            assert event.k > 1 or not one or out.tier[ids[0, 0]] == 0  # the best stays high
            seen.add((event.layer, event.k, one))

        e.inside.policy.decide = decided
        logits(e)

    asked = {"policy": "dymoe", "expert_ram": 1 << 24, "prefetch": "off", "retention": 0.5}
    run = recorded(build(packed, **options(**asked) | {"ubatch": 64}), tmp_path, with_report)
    assert seen == {(layer, k, one) for layer, k in ((0, 4), (1, 1)) for one in (False, True)}
    outcome, _ = replayed(run.trace, SPEEDS[-1])  # the trace records the same routing
    assert [list(each) for each in outcome.stats.routed] == [
        list(each) for each in run.stats.routed
    ]
    with (
        opened(packed, **options(policy="dynaexq", hot_experts=1, update_steps=4)) as runtime,
        runtime.evaluator() as e,
    ):
        before, pos = e.inside.store.resident()[-1].tolist(), 0

        def more():
            nonlocal pos
            e.eval([OTHER[0]], pos)
            pos += 1

        until(lambda: e.inside.store.resident()[-1].tolist() != before, more)
        e.inside.store.check()


def tight(model, part, **more):
    """Open a model whose memory holds 4,096 tokens and all but 1/part of the experts."""
    usual = {"policy": "lru", "threads": 1, **more}
    with opened(model, **usual, ctx=4096, force_managed=True) as runtime, runtime.evaluator() as e:
        cap = e.plan.total_bytes - e.plan.slots.total_bytes // part
    return opened(model, **usual, ctx=None, ram=cap, conversations=True)


@pytest.mark.parametrize("arch", ["qwen3next", "granitehybrid", "deepseek32", "gpt-oss", "gemma4"])
def test_planned_kv_bytes_equal_llama_cpps(arch, make, tmp_path, library):
    """The planned bytes of KV cells equal the bytes that llama.cpp reserves.

    Layers with KV cells, including indexers, share memory with the slots. Recurrent states of the
    other layers do not. Sliding-window layers keep all cells, as upstream does. 600 tokens touch at
    least 600 cells and less than two CELL_STEPs more.
    """
    model = repack(make(arch, WIDER), tmp_path / "long.gguf", context_length=8192)
    with tight(model, 4, ubatch=512, sequences=8) as runtime, runtime.evaluator() as e:
        plan, shared, cap = e.plan, e.plan.shared, e.config.ram
        cells, counted = (
            touched_memory(library).cache,
            host_memory(library, e.inside.context.handle),
        )
        states = counted[0] - cells.reserved
        assert (states > 0) == (arch in ("qwen3next", "granitehybrid"))
        others = plan.fixed_bytes - plan.kv_bytes - plan.compute_bytes
        assert shared.n_bytes == cap - others - states
        assert cells.reserved == shared.cell_bytes * e.n_ctx
        e.eval(PROMPT * 15, 0)
        found = shared.cells(touched_memory(library).cache.resident)
        assert 600 <= found < 600 + 2 * CELL_STEP


@pytest.mark.parametrize("arch", ["afmoe", "bailingmoe3", "deepseek2", "granitehybrid"])
def test_a_short_step_touches_no_more_than_was_counted(arch, make, tmp_path, library):
    """Short steps stay within the shared limit, although the context is made for longer steps."""
    model = repack(make(arch, WIDER), tmp_path / "long.gguf", context_length=8192)
    with tight(model, 8) as runtime, runtime.evaluator() as e:
        shared = e.plan.shared
        assert max(shared.scratch) > 512
        for n in (12, 1, 62, 3, 62):
            e.eval(PROMPT * n, e.n_cached)
            touched = sum(each.resident for each in touched_memory(library))
            assert e.inside.store.stats().slot_bytes + touched <= shared.n_bytes, n


@pytest.mark.skipif(isinstance(UNPATCHED, str), reason=str(UNPATCHED))
@pytest.mark.parametrize("arch", PROVEN)
def test_unpatched(arch, make):
    """Logits of unpatched llama.cpp equal ours, with and without managed experts, bit for bit."""
    model = make(arch)
    expected = UNPATCHED.logits(model, PROMPT, ANSWER)
    managed = {"policy": "lru", "expert_ram": smallest_budget(model, policy="lru", **AT_ONCE)}
    for settings in ({}, managed):
        with opened(model, **options(**AT_ONCE, **settings)) as runtime, runtime.evaluator() as e:
            assert e.inside.managed == bool(settings)
            rows = [part.copy() for part in e.eval_each(PROMPT, 0)]
            rows += [e.eval([t], len(PROMPT) + at) for at, t in enumerate(ANSWER)]
        np.testing.assert_array_equal(np.concatenate(rows), expected, err_msg=str(settings))


def pack_wider(arch, make, folder):
    """Pack a model with every expert in Q4_K and in Q2_K."""
    packed = folder / "packed.gguf"
    pack(make(arch, WIDER), packed, ["q4_k", "q2_k"])
    with ExpertModel.open(packed) as model:
        assert [tier.bpw for tier in model.tiers] == [4.5, 2.625]
    return packed


def divergence(found, exact):
    """Mean KL divergence in nats per token."""
    exact, found = (log_softmax(each.astype(np.float64)) for each in (exact, found))
    return float(np.mean([kl_divergence(*each) for each in zip(exact, found, strict=True)]))


@pytest.mark.parametrize("arch", NEWEST)
def test_two_precisions(arch, make, tmp_path):
    """Quality loss with two tiers, by policy.

    With one tier in use (lru, dynaexq, or floor with max_loss 0), logits equal those of the
    exported file of that tier, bit for bit. dymoe loses more with skipped experts than with lowered
    ones. floor with a limit predicts at most 1.2 times the limit and loses at most twice the limit.
    """
    packed = pack_wider(arch, make, tmp_path)

    def read(e):
        rows = [e.eval(PROMPT, 0)]
        rows += [e.eval([t], len(PROMPT) + at) for at, t in enumerate(ANSWER)]
        assert np.isfinite(rows).all()
        return np.concatenate(rows)

    def run(**settings):
        least = smallest_budget(packed, **settings)
        with (
            opened(packed, **options(**settings, expert_ram=2 * least)) as runtime,
            runtime.evaluator() as e,
        ):
            rows = read(e)
            e.inside.store.check()
            return rows, e.inside.driver.meter and e.inside.driver.meter.mean(Phase.DECODE)

    exported = {}
    for tier in ("q4_k", "q2_k"):
        export(packed, tmp_path / f"{tier}.gguf", tier)
        with opened(tmp_path / f"{tier}.gguf", **options()) as runtime, runtime.evaluator() as e:
            exported[tier] = read(e)
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, np.array(drawn(4 * CALIBRATED)) % 90 + 33)))
    table, method = tmp_path / "losses.json", Method(calib=text, tokens=CALIBRATED, threads=1)
    notes = []
    measure_losses(method, packed, None, [], table, lambda *_: None, notes.append)
    assert [note for note in notes if not note.startswith("Calibrating takes")] == []

    floor = {"policy": "floor", "losses": table, "low_tier": "q2_k"}
    for tier, settings in (
        ("q4_k", {"policy": "lru"}),
        ("q2_k", {"policy": "lru", "high_tier": "q2_k"}),
        ("q2_k", {"policy": "dynaexq", "hot_experts": 0}),
        ("q4_k", {**floor, "max_loss": 0.0}),
    ):
        np.testing.assert_array_equal(run(**settings)[0], exported[tier], err_msg=str(settings))
    lost = {}
    for low_tier in ("q2_k", "skip"):
        rows, _ = run(policy="dymoe", low_tier=low_tier, retention=0.75)
        lost[low_tier] = divergence(rows, exported["q4_k"])
    assert 0 < lost["q2_k"] < lost["skip"]
    allowed = lost["skip"] / 4
    rows, predicted = run(**floor, max_loss=allowed)
    assert 0 < predicted < 1.2 * allowed
    assert 0 < divergence(rows, exported["q4_k"]) < 2 * allowed


@pytest.mark.parametrize("arch", NEWEST)
def test_a_prompt_comes_back_after_a_kill(arch, make, tmp_path):
    """After a kill, a stored conversation continues with the same logits as without the kill.

    If the process was killed before the conversation was stored, the prompt is read again as a new
    one.
    """
    model, folder = pack_wider(arch, make, tmp_path), tmp_path / "prompts"
    least = smallest_budget(model, policy="lru")

    def talking(kept):
        config = build(model, **options(policy="lru", expert_ram=least, prompt_cache=kept))
        return Runtime.open(config, answering=Answering(reads_ahead=False), say=said.append)

    def talk():
        with talking(folder) as runtime:
            evaluated(runtime, PROMPT)
            evaluated(runtime, OTHER)

    said = []
    with talking(None) as runtime:
        more = [*PROMPT, *answered(runtime, PROMPT)["tokens"][:-1], *ANSWER]
        continued = first_logits(runtime, more)
    with talking(None) as runtime:
        new = first_logits(runtime, more)
    total = calls_of(talk, COPIES_MODULE)
    n_read = []
    for at in (total // 20, total * 2 // 3, total):
        shutil.rmtree(folder)
        assert killed(talk, at, COPIES_MODULE)
        with talking(folder) as runtime:
            n_read.append(evaluated(runtime, more, 1))
            found = runtime.inside.context.logits().copy()
        assert said == []
        np.testing.assert_array_equal(found, new if n_read[-1] == len(more) else continued)
    assert n_read == [len(more), len(ANSWER), len(ANSWER)]


def test_a_table_is_read_by_rows(make, tmp_path):
    """A prompt reads the blocks of its table rows once, and at most 20 % more."""
    model = widen(make("gemma4"), tmp_path / "wide.gguf", n_vocab=200_000, n_ctx=512)
    rng = np.random.default_rng(0)
    first, then = rng.permutation(200_000)[:600].reshape(2, 300).tolist()
    asked = options(ctx=512, policy="lru", expert_ram=1 << 26)
    at_first = read_bytes()
    with opened(model, **asked) as runtime, runtime.evaluator() as e:
        forget(model)  # blocks that the load read ahead of neighbouring tensors
        assert (
            len(e.inside.model.lookup) == 2
            and f"{e.inside.model.lookup_text} on disk" in runtime.mode
        )
        e.eval(first, 0)  # reads nearly all experts
        stats, before = e.inside.store.stats(), read_bytes()
        if before == at_first:
            pytest.skip("the temporary folder is not on a disk")
        rows = [e.eval(then, 0)]
        of_experts = sum(e.inside.store.stats().demand_bytes) - sum(stats.demand_bytes)
        read = (read_bytes() - before - of_experts) / BLOCK
        rows.append(e.eval(then[:1], len(then)))
    needed = blocks_of(model, first + then) - blocks_of(model, first)
    assert needed <= read <= 1.2 * needed
    with opened(model, **options(ctx=512)) as runtime, runtime.evaluator() as e:
        assert not e.inside.managed
        plain = [e.eval(then, 0), e.eval(then[:1], len(then))]
    np.testing.assert_array_equal(rows, plain)


def test_experts_chosen_by_token_id_are_prefetched(make):
    """Layers that choose experts by token id prefetch exactly the experts that are routed.

    With prefetch on, every read is a prefetch and every prefetch is used, both in an answer with
    few slots and in a prompt with free slots. Logits and bytes read equal those without prefetch.
    """
    model = make("deepseek4", n_by_token=4)
    with ExpertModel.open(model) as file:
        slice_bytes = file.slices[0][DOWN][0].expert_bytes
    found, read = {}, {}
    for prefetch in ("on", "off"):
        asked = {"policy": "dymoe", "prefetch": prefetch}
        least = smallest_budget(model, **asked)
        for budget, prompt in ((2 * least, PROMPT[:1]), (8 * least, PROMPT)):
            key = prefetch, len(prompt)
            with (
                opened(model, **options(**asked, expert_ram=budget, logits_all=True)) as runtime,
                runtime.evaluator() as e,
            ):
                rows = [row for part in e.eval_each(prompt, 0) for row in part.copy()]
                rows += [e.eval([each], len(prompt) + i)[0] for i, each in enumerate(PROMPT)]
                e.inside.store.check()
                stats = e.inside.store.stats()
            found[key] = np.stack(rows)
            read[key] = sum(stats.demand_bytes) + sum(stats.prefetch_bytes)
            expected = read[key] // slice_bytes if prefetch == "on" else 0
            unused = stats.prefetch_wasted + stats.prefetch_cancelled
            assert (stats.prefetch_used, unused) == (expected, 0), key
    for prompt in (1, len(PROMPT)):
        np.testing.assert_array_equal(found["on", prompt], found["off", prompt])
        assert 0 < read["on", prompt] == read["off", prompt]


@pytest.mark.parametrize("arch", NO_EXPERTS)
def test_without_expert_tensors(arch, make):
    with pytest.raises(NotMoEError):
        opened(make(arch), **options())


@pytest.mark.parametrize("arch", NOT_COMPUTED)
def test_experts_that_no_graph_computes(arch, make):
    model = make(arch)
    with (
        opened(model, **options(policy="lru", expert_ram=1 << 24)) as runtime,
        runtime.evaluator() as e,
    ):
        np.testing.assert_array_equal(logits(e), plain_logits(model))
        assert sum(e.inside.store.stats().requests) == 0


@pytest.mark.parametrize("arch", DIFFUSION)
def test_diffusion_is_refused(arch, make):
    """Diffusion models are refused, because decoding a token would abort this process.

    llama.cpp has a separate program for them.
    """
    with pytest.raises(NativeError, match="diffusion models are not supported"):
        opened(make(arch), **options())
