"""`make cuda-check` fails on warnings in our files alone; for which cards is compiled."""

import pytest

from patches import cuda
from patches.upstream import BuildError


def compiler(folder, command):
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nvcc(tmp_path):
    """A compiler that knows cards up to 9.0."""
    return compiler(tmp_path, "printf 'compute_75\\ncompute_80\\ncompute_86\\ncompute_90\\n'")


def test_real_code_for_the_cards_that_nvcc_knows(nvcc, capsys):
    assert cuda.architectures(nvcc, [75, 86]) == "75-real;86-real"
    assert cuda.architectures(nvcc, []) == "80-virtual"
    assert not capsys.readouterr().err
    # newer than the toolkit, and between two that it knows
    assert cuda.architectures(nvcc, [120]) == "90-virtual"
    assert "does not know the GPU's compute capability 12.0" in capsys.readouterr().err
    assert cuda.architectures(nvcc, [89, 89]) == "86-virtual"
    with pytest.raises(BuildError, match=r"6\.1, and this CUDA toolkit compiles for 7\.5"):
        cuda.architectures(nvcc, [61])


def test_a_compiler_that_names_no_architecture_is_one_sentence(tmp_path):
    with pytest.raises(BuildError, match="--list-gpu-arch names no architecture"):
        cuda.offered_architectures(compiler(tmp_path, "exit 1"))
