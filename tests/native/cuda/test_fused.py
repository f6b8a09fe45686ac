"""gate and up in one launch, and tables that stay on the device."""


def test_gate_up_and_fixed_tables(device):
    """Fused if all types agree, separate otherwise; CUDA graphs with changing tables."""
    output = device.run(
        *("fused_test", "q4_K+q2_K", "f16+q8_0"),
        types=("q4_k", "q2_k", "q8_0"),
        more=("unary.cu",),
    )
    assert output.count("NMSE") == 2


def test_lifetimes(device):
    """Backends in sequence, graphs and their pool, and tables that change under load."""
    output = device.run(
        *("lifetime_test", "q4_K+q2_K"),
        types=("q4_k", "q2_k", "q8_0"),
        more=("unary.cu",),
        delay_us=100,
    )
    assert output == "fine\n"
