"""Random mixes of requests within a memory limit have the same logits as runs with ample memory.

This is the short form of tests/helpers/mixing.py.
"""

import pytest
from mixing import SHAPE, Mixes, count_differences, settings_of, tight

from gguf_tools import synthetic
from orchestrator.runtime.runtime import Runtime

N_CTX = 8192


@pytest.mark.parametrize("policy", ["lru", "dymoe"])
def test_logits_equal_those_with_ample_memory(library, tmp_path, policy):
    model = synthetic.write(tmp_path / "model.gguf", SHAPE, tiers=("q8_0",))
    ram = tight(model, policy)
    config = settings_of(model, N_CTX, policy=policy, ram=ram, conversations=True, ubatch=1024)
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        mixes = [list(Mixes(e, seed, longest=4000).mix()) for seed in (0, 4)]
        held = e.inside.store.stats()
        assert held.evictions
    reads = [read for mix in mixes for read in mix]
    assert any(read.fork for read in reads) and any(not read.row for read in reads)
    assert any(len(read.at_once) > 1 for read in reads)
    with Runtime.open(settings_of(model, N_CTX, ubatch=4096)) as runtime, runtime.evaluator() as e:
        assert not e.inside.managed
        assert [count_differences(e, mix) for mix in mixes] == [0] * len(mixes)
