"""Every Mixture-of-Experts architecture that upstream's own test makes models of, and some that it
leaves out: what a managed one computes is what llama.cpp's plain path computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.errors import NotMoEError
from gguf_tools.experts import PROVEN, ExpertModel
from gguf_tools.file.layout import DOWN
from gguf_tools.pack import export, pack
from orchestrator.engine.engine import Engine
from orchestrator.errors import BudgetError, NativeError

from .conftest import drawn, greedy, opened, run_program
from .lookup_table import BLOCK, blocks_of, forget, read_bytes, widen

HERE = Path(__file__).parent
# Those that upstream's test takes for Mixtures of Experts, and why they are none here.
NO_EXPERTS = ("ernie4_5", "paddleocr")  # no tensors of experts
NOT_COMPUTED = ("refact",)  # llama.cpp's graph has another product in their place
DIFFUSION = ("llada-moe", "rnd1")
EXCEPTIONS = {*NO_EXPERTS, *NOT_COMPUTED, *DIFFUSION}
PROMPT = [each % 128 for each in drawn(40)]
N_DECODE = 6
POLICIES = (
    {"policy": "lru"},
    {"policy": "dymoe", "prefetch": "on", "low_tier": "skip", "retention": 1.0},
)
# Experts, how many of them a token uses, and layers: as upstream makes them, which leaves nothing
# to choose, and so that experts come and go.
AS_UPSTREAM, STREAMED, WIDER = (2, 2, 0), (8, 2, 4), (16, 4, 4)
# Layers whose experts are chosen by the tokens' ids, where the architecture has them.
N_BY_TOKEN = 2
NEWEST = (
    *("gemma4", "qwen4exp", "deepseek4", "deepseek32", "glm-dsa", "glm5-next", "hy_v3", "kimi-k3"),
    *("kimi-linear", "minimax-m3", "llama4", "mistral4", "step35", "mimo2", "lfm2moe"),
)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def maker(compile_native: Callable[..., Path], llama_source: Path) -> Path:
    """Upstream's test, with another main function."""
    places = (HERE / "archs", *(llama_source / each for each in ("tests", "src", "vendor")))
    flags = ("-std=c++17", "-w", "-O1", "-g0", *(f"-I{each}" for each in places))
    return compile_native("make_models", [HERE / "archs" / "make_models.cpp"], *flags)


@pytest.fixture
def make(maker: Path, tmp_path: Path) -> Make:
    """make(architecture, size, n_by_token): one of its models."""

    def made(
        arch: str, size: tuple[int, int, int] = STREAMED, n_by_token: int = N_BY_TOKEN
    ) -> Path:
        run_program(maker, arch, tmp_path, *size, n_by_token)
        return tmp_path / f"{arch}.gguf"

    return made


def options(**more: object) -> dict[str, object]:
    return {"ctx": 128, "ubatch": 32, "threads": 1, "use_extra_bufts": False, **more}


def logits(engine: Engine) -> np.ndarray:
    rows = greedy(engine, PROMPT, N_DECODE)
    assert np.isfinite(rows).all()
    if engine.managed:
        engine.store.check()
    return rows


def plain_logits(model: Path) -> np.ndarray:
    with opened(model, **options()) as engine:
        assert not engine.managed
        return logits(engine)


def smallest_budget(model: Path, **more: object) -> int:
    with pytest.raises(BudgetError) as refused:
        opened(model, **options(**more, expert_ram=1))
    return refused.value.needed_bytes


def test_every_one_is_listed(maker: Path) -> None:
    assert set(run_program(maker).split()) == set(PROVEN) | EXCEPTIONS


@pytest.mark.parametrize("arch", PROVEN)
def test_bit_for_bit(arch: str, make: Make) -> None:
    for size in (AS_UPSTREAM, STREAMED):
        model = make(arch, size)
        expected = plain_logits(model)
        for policy in POLICIES:
            least = smallest_budget(model, **policy)
            with opened(model, **options(**policy, expert_ram=least)) as engine:
                np.testing.assert_array_equal(logits(engine), expected, err_msg=f"{size} {policy}")
                stats = engine.store.stats()
                assert min(stats.requests) > 0
    # with experts to choose from, look-ahead is what loads ahead
    assert (sum(stats.prefetch_bytes) > 0) == (not PROVEN[arch])


@pytest.mark.parametrize("arch", NEWEST)
def test_two_precisions(arch: str, make: Make, tmp_path: Path) -> None:
    """Each precision of a packed file is the file of it, under a policy that moves experts and one
    that exchanges them. What mixes them, or skips, ends in numbers."""
    packed = tmp_path / "packed.gguf"
    pack(make(arch, WIDER), packed, ["q8_0", "q4_0"])
    exported = {}
    for tier in ("q8_0", "q4_0"):
        export(packed, tmp_path / f"{tier}.gguf", tier)
        exported[tier] = plain_logits(tmp_path / f"{tier}.gguf")

    def run(**settings: object) -> np.ndarray:
        with opened(packed, **options(**settings, expert_ram=smallest(settings))) as engine:
            return logits(engine)

    def smallest(settings: dict[str, object]) -> int:
        return 2 * smallest_budget(packed, **settings)

    for tier, settings in (
        ("q8_0", {"policy": "lru"}),
        ("q4_0", {"policy": "lru", "high_tier": "q4_0"}),
        ("q4_0", {"policy": "dynaexq", "hot_experts": 0}),
    ):
        np.testing.assert_array_equal(run(**settings), exported[tier], err_msg=str(settings))
    for low_tier in ("q4_0", "skip"):
        mixed = run(policy="dymoe", low_tier=low_tier, retention=0.75)
        assert not np.array_equal(mixed, exported["q8_0"])


def test_a_table_is_read_by_rows(make: Make, tmp_path: Path) -> None:
    """A prompt has the blocks of its rows read, each once, and hardly more."""
    model = widen(make("gemma4"), tmp_path / "wide.gguf", n_vocab=20000, n_each=300, n_ctx=512)
    rng = np.random.default_rng(0)
    first, then = rng.permutation(20000)[:600].reshape(2, 300).tolist()
    asked = options(ctx=512, policy="lru", expert_ram=1 << 26)
    at_first = read_bytes()
    with opened(model, **asked) as engine:
        forget(model)  # what was read ahead of the tensors beside the table
        assert "per_layer_token_embd.weight (91.6 MiB) on disk" in engine.mode
        engine.eval(first, 0)  # which has all experts read
        stats, before = engine.store.stats(), read_bytes()
        if before == at_first:
            pytest.skip("the file system of this folder has no disk behind it")
        rows = [engine.eval(then, 0)]
        read = (read_bytes() - before) / BLOCK
        assert sum(engine.store.stats().demand_bytes) == sum(stats.demand_bytes)
        rows.append(engine.eval(then[:1], len(then)))
    needed = blocks_of(model, first + then) - blocks_of(model, first)
    assert needed <= read <= 1.2 * needed
    with opened(model, **options(ctx=512)) as engine:
        assert not engine.managed
        plain = [engine.eval(then, 0), engine.eval(then[:1], len(then))]
    np.testing.assert_array_equal(rows, plain)


def test_what_ids_choose_is_read_ahead(make: Make) -> None:
    """In an answer, in one with as many slots as a token needs, and in a prompt, which finds free
    ones: every read is asked for ahead, and used. So what is asked for is what is routed to."""
    model = make("deepseek4", n_by_token=4)
    with ExpertModel.open(model) as file:
        slice_bytes = file.slices[0][DOWN][0].expert_bytes
    found, read = {}, {}
    for prefetch in ("on", "off"):
        asked = {"policy": "dymoe", "prefetch": prefetch}
        least = smallest_budget(model, **asked)
        for budget, prompt in ((2 * least, PROMPT[:1]), (8 * least, PROMPT)):
            key = prefetch, len(prompt)
            with opened(model, **options(**asked, expert_ram=budget, logits_all=True)) as engine:
                rows = [row for part in engine.eval_each(prompt, 0) for row in part.copy()]
                rows += [engine.eval([each], len(prompt) + i)[0] for i, each in enumerate(PROMPT)]
                engine.store.check()
                stats = engine.store.stats()
            found[key] = np.stack(rows)
            read[key] = sum(stats.demand_bytes) + sum(stats.prefetch_bytes)
            expected = read[key] // slice_bytes if prefetch == "on" else 0
            unused = stats.prefetch_wasted + stats.prefetch_cancelled
            assert (stats.prefetch_used, unused) == (expected, 0), key
    for prompt in (1, len(PROMPT)):
        np.testing.assert_array_equal(found["on", prompt], found["off", prompt])
        assert 0 < read["on", prompt] == read["off", prompt]


@pytest.mark.parametrize("arch", NO_EXPERTS)
def test_without_expert_tensors(arch: str, make: Make) -> None:
    with pytest.raises(NotMoEError):
        opened(make(arch), **options())


@pytest.mark.parametrize("arch", NOT_COMPUTED)
def test_experts_that_no_graph_computes(arch: str, make: Make) -> None:
    model = make(arch)
    with opened(model, **options(policy="lru", expert_ram=1 << 24)) as engine:
        np.testing.assert_array_equal(logits(engine), plain_logits(model))
        assert sum(engine.store.stats().requests) == 0


@pytest.mark.parametrize("arch", DIFFUSION)
def test_diffusion_is_refused(arch: str, make: Make) -> None:
    """llama.cpp has a program of its own for them; decoding a token would end this process."""
    with pytest.raises(NativeError, match="writes a text by diffusion, and not token by token"):
        opened(make(arch), **options())
