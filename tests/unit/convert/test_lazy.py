"""Parts of upstream's lazy tensors equal the same parts of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch
from safetensors.torch import save_file

from gguf_tools.convert import lazy, upstream

N_EXPERT, ROWS, N = 5, 6, 8


class Files:
    """Lazy tensors over a safetensors file; ``read`` counts the loads of each."""

    def __init__(self, folder: Path, base: Any, gguf: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes: dict[str, tuple[int, ...]] = {f"e{e}": (ROWS, N) for e in range(N_EXPERT)}
        shapes |= {
            "fused": (N_EXPERT, 2 * ROWS, N),
            "swapped": (N_EXPERT, N, ROWS),
            "turned": (ROWS, N, N_EXPERT),
            "dense": (9, N),
        }
        tensors = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors")
        self.base = base
        self.local = gguf.utility.SafetensorsLocal(folder / "model.safetensors").tensors
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Any:
        found = self.base.LazyTorchTensor.from_local_tensor(self.local[name])
        load = found._func

        def counted(tensor: Any) -> Any:
            self.read.append(name)
            return load(tensor)

        found._func = counted
        return found.to(torch.float32)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with upstream._loaded() as (_, base, gguf):
        yield Files(tmp_path, base, gguf)


def stacked(files: Files) -> Any:
    return torch.stack([files[f"e{e}"] for e in range(N_EXPERT)], dim=0)


def half(files: Files) -> Any:
    return files["fused"][..., ROWS:, :].contiguous()


def swapped(files: Files) -> Any:
    return files["swapped"].transpose(-1, -2)


def permuted(files: Files) -> Any:
    return files["swapped"].permute(0, 2, 1)


def chunked(files: Files) -> Any:
    return files["fused"].chunk(2, dim=-2)[1]


def divided(files: Files) -> Any:
    return files["fused"].split(ROWS, dim=-2)[0]


def by_function(files: Files) -> Any:
    return torch.split(files["fused"], [ROWS, ROWS], dim=1)[1]


def every_other(files: Files) -> Any:
    return files["fused"][:, 1::2, :]


def flipped(files: Files) -> Any:
    return files["swapped"].flip(0).transpose(1, 2)


def rotated(files: Files) -> Any:
    return files["turned"].permute(2, 0, 1)


def scaled_stack(files: Files) -> Any:
    return torch.stack([files[f"e{e}"] * (e + 1) for e in range(N_EXPERT)])


def negated_dense(files: Files) -> Any:
    return -files["dense"]


DIVISIBLE = (
    stacked,
    half,
    swapped,
    permuted,
    chunked,
    divided,
    by_function,
    every_other,
    scaled_stack,
)
WHOLE = (flipped, rotated)
ALL = (*DIVISIBLE, *WHOLE)


@pytest.mark.parametrize("make", ALL, ids=lambda each: each.__name__)
def test_parts_are_parts_of_the_whole(files: Files, make: Callable[[Files], Any]) -> None:
    whole = make(files)
    expected = np.asarray(files.base.LazyTorchTensor.to_eager(make(files)))
    assert expected.shape == (N_EXPERT, ROWS, N)
    found = lazy.compute(whole.numpy())
    np.testing.assert_array_equal(found, expected)
    for cuts in (
        (slice(2, 3),),
        (slice(0, 5),),
        (slice(4, 5), slice(1, 4)),
        (slice(1, 2), slice(5, 6)),
    ):
        np.testing.assert_array_equal(lazy.compute(whole.numpy(), cuts), expected[cuts])
    assert whole._data is None  # nothing stays in the graph


def test_an_expert_is_computed_alone(files: Files) -> None:
    lazy.compute(stacked(files).numpy(), (slice(3, 4), slice(0, 2)))
    assert files.read == ["e3"]


@pytest.mark.parametrize("make", ALL, ids=lambda each: each.__name__)
def test_what_divides_is_known(files: Files, make: Callable[[Files], Any]) -> None:
    assert lazy.divisible(make(files).numpy()) == (make in DIVISIBLE)


def test_dense_rows(files: Files) -> None:
    dense = files["dense"].numpy()
    assert lazy.divisible(dense)
    expected = lazy.compute(dense)
    np.testing.assert_array_equal(lazy.compute(dense, (slice(3, 7),)), expected[3:7])
    assert not lazy.divisible(negated_dense(files))
    np.testing.assert_array_equal(
        lazy.compute(negated_dense(files).numpy(), (slice(3, 7),)), -expected[3:7]
    )


def test_arrays_are_cut_as_they_are() -> None:
    array = np.arange(12).reshape(3, 4)
    assert lazy.divisible(array)
    np.testing.assert_array_equal(lazy.compute(array, (slice(1, 2),)), array[1:2])
