"""The image encoder that is downloaded with a model."""

import pytest

from gguf_tools.hub.selection import select_files

REPO = {
    "m-Q4.gguf": 9,
    "m-Q8.gguf": 12,
    "mmproj-BF16.gguf": 4,
    "mmproj-F16.gguf": 4,
    "mmproj-F32.gguf": 8,
    "x.json": 1,
}


@pytest.mark.parametrize(
    ("names", "include", "chosen"),
    [
        (REPO, ["m-Q4*"], ["m-Q4.gguf", "mmproj-F16.gguf"]),
        (REPO, ["m-Q4*", "mmproj-F32*"], ["m-Q4.gguf", "mmproj-F32.gguf"]),
        (REPO, ["*.json"], ["x.json"]),
        (
            ["m-Q4.gguf", "mmproj-Q8_0.gguf", "mmproj-BF16.gguf"],
            [],
            ["m-Q4.gguf", "mmproj-BF16.gguf"],
        ),
        (["m-Q4.gguf"], [], ["m-Q4.gguf"]),
    ],
)
def test_a_model_comes_with_its_image_encoder(names, include, chosen):
    sizes = {name: REPO.get(name, 5) for name in names}
    assert select_files("o/n", sizes, include) == chosen
