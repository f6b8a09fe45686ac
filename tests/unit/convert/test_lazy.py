"""Parts of upstream's lazy tensors equal the same parts of the whole tensor."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch
from safetensors.torch import save_file

from gguf_tools.convert import lazy, upstream

N_EXPERT, ROWS, N = 5, 6, 8


class Files:
    """Lazy tensors of a safetensors file. `read` records the name at each load."""

    def __init__(self, folder, base, gguf):
        generator = torch.Generator().manual_seed(0)
        shapes = {f"e{e}": (ROWS, N) for e in range(N_EXPERT)}
        shapes |= {"fused": (N_EXPERT, 2 * ROWS, N), "swapped": (N_EXPERT, N, ROWS)}
        shapes |= {"turned": (ROWS, N, N_EXPERT), "dense": (9, N)}
        tensors = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors")
        self.base = base
        self.local = gguf.utility.SafetensorsLocal(folder / "model.safetensors").tensors
        self.read = []

    def __getitem__(self, name):
        found = self.base.LazyTorchTensor.from_local_tensor(self.local[name])
        load = found._func

        def counted(tensor):
            self.read.append(name)
            return load(tensor)

        found._func = counted
        return found.to(torch.float32)


@pytest.fixture
def files(tmp_path):
    with upstream._loaded() as (_, base, gguf):
        yield Files(tmp_path, base, gguf)


DIVISIBLE = {
    "stacked": lambda files: torch.stack([files[f"e{e}"] for e in range(N_EXPERT)], dim=0),
    "scaled": lambda files: torch.stack([files[f"e{e}"] * (e + 1) for e in range(N_EXPERT)]),
    "half": lambda files: files["fused"][..., ROWS:, :].contiguous(),
    "swapped": lambda files: files["swapped"].transpose(-1, -2),
    "permuted": lambda files: files["swapped"].permute(0, 2, 1),
    "chunked": lambda files: files["fused"].chunk(2, dim=-2)[1],
    "divided": lambda files: files["fused"].split(ROWS, dim=-2)[0],
    "by function": lambda files: torch.split(files["fused"], [ROWS, ROWS], dim=1)[1],
    "every other": lambda files: files["fused"][:, 1::2, :],
}
WHOLE = {
    "flipped": lambda files: files["swapped"].flip(0).transpose(1, 2),
    "rotated": lambda files: files["turned"].permute(2, 0, 1),
}
ALL = DIVISIBLE | WHOLE


@pytest.mark.parametrize("name", ALL)
def test_parts_are_parts_of_the_whole(files, name):
    whole = ALL[name](files)
    assert lazy.divisible(whole.numpy()) == (name in DIVISIBLE)
    expected = np.asarray(files.base.LazyTorchTensor.to_eager(ALL[name](files)))
    assert expected.shape == (N_EXPERT, ROWS, N)
    found = lazy.compute(whole.numpy())
    np.testing.assert_array_equal(found, expected)
    two = (slice(4, 5), slice(1, 4)), (slice(1, 2), slice(5, 6))
    for cuts in ((slice(2, 3),), (slice(0, 5),), *two):
        np.testing.assert_array_equal(lazy.compute(whole.numpy(), cuts), expected[cuts])
    assert whole._data is None  # the graph keeps no data


def test_an_expert_is_computed_alone(files):
    lazy.compute(DIVISIBLE["stacked"](files).numpy(), (slice(3, 4), slice(0, 2)))
    assert files.read == ["e3"]


def test_dense_rows(files):
    dense = files["dense"].numpy()
    assert lazy.divisible(dense)
    expected = lazy.compute(dense)
    np.testing.assert_array_equal(lazy.compute(dense, (slice(3, 7),)), expected[3:7])
    negated = -files["dense"]
    assert not lazy.divisible(negated)
    np.testing.assert_array_equal(lazy.compute(negated.numpy(), (slice(3, 7),)), -expected[3:7])


def test_arrays_are_cut_as_they_are():
    array = np.arange(12).reshape(3, 4)
    assert lazy.divisible(array)
    np.testing.assert_array_equal(lazy.compute(array, (slice(1, 2),)), array[1:2])
