"""A short form of tests/fuzz/long.py: every damaged file gives an error of ours or a model.

The result comes at once and with little memory.
"""

import tracemalloc
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import Search
from targets import TARGETS, WITH_GGML

from gguf_tools.errors import QuantizeError, WriteError
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter, encode_value
from gguf_tools.quantize.ggml import library_path

# Memory limit for a damaged file of 100 KiB. A valid file takes a tenth of it.
MOST_BYTES = 16 << 20
REPEATABLE = {"deadline": None, "derandomize": True, "database": None}


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    return Search(tmp_path_factory.mktemp("fuzz"), [])


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_accepts_or_refuses(search, name):
    target = TARGETS[name]
    if target in WITH_GGML:
        try:
            library_path()
        except QuantizeError as error:
            pytest.skip(str(error))
    answers = set()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), **REPEATABLE)
    @given(st.randoms(use_true_random=False))
    def run(random):
        tracemalloc.start()
        try:
            answers.add(target(search.bench, random))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < MOST_BYTES

    run()
    answers.update(target(search.bench, Random(seed)) for seed in range(120))
    assert len(answers) > 1


letters = st.characters(exclude_categories=["Cs"])
texts, numbers = st.text(letters), st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(width=32)
single = st.booleans() | numbers | st.text(letters, max_size=20)
values = st.recursive(single, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@settings(max_examples=150, **REPEATABLE)
@given(metadata=st.dictionaries(texts, values, max_size=4))
def test_metadata_survives_a_round_trip(tmp_path_factory, metadata):
    """Metadata that was written is read unchanged.

    The writer may refuse mixed lists, an empty key, control characters in a key, or an alignment of
    the wrong type.
    """
    path = tmp_path_factory.mktemp("meta") / "m.gguf"
    refused = set()
    with GGUFWriter(path) as writer:
        for key, value in metadata.items():
            try:
                writer.meta(key, value)
            except WriteError as error:
                assert str(error)
                refused.add(key)
        writer.begin()
    with GGUFFile.open(path) as file:
        assert list(file.metadata) == [key for key in metadata if key not in refused]
        for key, value in file.metadata.items():
            assert repr(value) == repr(metadata[key])
            assert file.encoded_value(key) == encode_value(metadata[key])
