"""Random mixes under a cap have the rows of a run with memory to spare: the short form of
tests/helpers/mixing.py."""

import pytest
from mixing import SHAPE, Mixes, settings_of, tight, unlike

from gguf_tools import synthetic
from orchestrator.runtime.engine import Engine

N_CTX = 8192


@pytest.mark.parametrize("policy", ["lru", "dymoe"])
def test_rows_are_those_of_memory_to_spare(library, tmp_path, policy):
    model = synthetic.write(tmp_path / "model.gguf", SHAPE, tiers=("q8_0",))
    ram = tight(model, policy)
    config = settings_of(model, N_CTX, policy=policy, ram=ram, conversations=True, ubatch=1024)
    with Engine.open(config) as engine:
        mixes = [list(Mixes(engine, seed, longest=4000).mix()) for seed in (0, 4)]
        held = engine.store.stats()
        assert held.evictions
    reads = [read for mix in mixes for read in mix]
    assert any(read.fork for read in reads) and any(not read.row for read in reads)
    assert any(len(read.at_once) > 1 for read in reads)
    with Engine.open(settings_of(model, N_CTX, ubatch=4096)) as engine:
        assert not engine.managed
        assert [unlike(engine, mix) for mix in mixes] == [0] * len(mixes)
