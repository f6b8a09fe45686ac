"""MUL_MAT_ID on the GPU: upstream's kernels, and the executor of managed experts."""

import os

import pytest

# Read at collection, because the environment is cleared while a test runs.
ALL = bool(os.environ.get("MOE_EDGE_SLOW"))

# Sets of tiers with the MMQ kernels that they need. IQ1_M and float types have none.
TIERS = {
    "q4_K+q2_K": ("q4_k", "q2_k"),
    "f16+q8_0+iq1_m": ("q8_0",),
    "q4_0+q2_0": ("q4_0", "q2_0"),
    "f16+q8_0+q4_K+q2_K+q2_0": ("q8_0", "q4_k", "q2_k", "q2_0"),
}
MORE_TIERS = {
    "q6_K+q3_K+iq4_nl": ("q6_k", "q3_k", "iq4_nl"),
    "q5_K+iq4_xs": ("q5_k", "iq4_xs"),
    "bf16+iq3_s+iq2_s": ("iq3_s", "iq2_s"),
    "q8_0+iq3_xxs+iq2_xxs": ("q8_0", "iq3_xxs", "iq2_xxs"),
    "q4_1+iq2_xs+iq1_s": ("q4_1", "iq2_xs", "iq1_s"),
    "f32+q5_1+q5_0": ("q5_1", "q5_0"),
}


def mmq_types(sets):
    return tuple(sorted({name for types in sets.values() for name in types}))


def test_upstreams_kernels(device):
    """MMVQ and MMQ on plain tensors, compared with dot products in double precision.

    On a GPU this checks the build, on the emulated GPU the emulation.
    """
    output = device.run(
        "kernels_test", "q4_K", "q2_K", "--", 1, 2, 8, 9, 33, types=mmq_types(TIERS)
    )
    assert output.count("NMSE") == 10


@pytest.mark.parametrize("sets", [TIERS, MORE_TIERS], ids=("some", "more"))
def test_experts_of_several_types(device, sets):
    """The error is within upstream's limit for the op.

    Batches have 1 to 512 tokens, with experts of each tier and skipped ones. There are fewer slots
    than experts.
    """
    if sets is MORE_TIERS and device.emulated and not ALL:
        pytest.skip("compiles all kernels for the emulated GPU: set MOE_EDGE_SLOW=1")
    output = device.run("managed_test", "types", *sets, types=mmq_types(TIERS | sets))
    assert output.count("30 cases") == len(sets)


@pytest.mark.parametrize("how", ["wide", "far"])
def test_shapes_of_real_models(device, monkeypatch, how):
    """Rows are right with the shapes and distances of real models.

    wide: 8 of 128 experts and 2,048 columns, as in Qwen3-30B. far: slots more than 4 GiB apart.
    Memory that is not used costs nothing on the emulated GPU.
    """
    monkeypatch.setenv("MOE_EMU_VRAM", str(16 << 30))
    sets = ("q4_K+q2_K", "f16+q8_0")
    output = device.run("managed_test", how, *sets, types=mmq_types(TIERS))
    if not device.emulated and "too small" in output:
        pytest.skip(output.splitlines()[-1])
    assert output.count("worst NMSE") == len(sets)


def test_random_swaps(device):
    """Random swaps of experts give no wrong row.

    Every freed slot is filled with NaN before it is loaded again, and streams sleep at random. Some
    experts are read from pageable and from pinned memory.
    """
    steps = 600 if device.emulated and not ALL else 10_000
    output = device.run(
        "managed_test", "random", steps, *TIERS, types=mmq_types(TIERS), delay_us=200
    )
    assert output.count(f"{steps} steps, no wrong row") == len(TIERS)


@pytest.mark.parametrize("order", ["load", "reuse"])
def test_a_missing_wait_gives_wrong_rows(emulated, order):
    """Without the wait for a copy or for a slot's last reader, rows are wrong.

    The tests above rely on this. A real GPU may be fast enough to be right by chance.
    """
    with pytest.raises(AssertionError, match="row "):
        emulated.run(
            *("managed_test", "random", 400, "q4_K+q2_K", "--break", order),
            types=mmq_types(TIERS),
            delay_us=200,
        )
