"""gate and up in one launch, and tables that stay on the device."""


def test_gate_up_and_fixed_tables(device):
    """gate and up have one launch if all types agree, and the outputs are right in CUDA graphs."""
    output = device.run(
        *("fused_test", "q4_K+q2_K", "f16+q8_0"),
        types=("q4_k", "q2_k", "q8_0"),
        more=("unary.cu",),
    )
    assert output.count("NMSE") == 2


def test_lifetimes(device):
    """lifetime_test.cpp: backends in sequence, graphs and their pool, and changing tables."""
    output = device.run(
        *("lifetime_test", "q4_K+q2_K"),
        types=("q4_k", "q2_k", "q8_0"),
        more=("unary.cu",),
        delay_us=100,
    )
    assert output == "fine\n"
