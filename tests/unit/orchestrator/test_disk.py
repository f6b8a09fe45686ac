"""The probe of the disk, which reads as the store does."""

import random
import re
from itertools import islice, pairwise
from pathlib import Path

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, UP
from orchestrator import disk

NATIVE = Path(__file__).resolve().parents[3] / "patches" / "native"


def test_parts_are_those_of_the_store():
    source = (NATIVE / "moe-edge-store.h").read_text()
    found = re.search(r"#define MOE_EDGE_PART_BYTES \((\d+) << (\d+)\)", source)
    assert found is not None
    assert int(found[1]) << int(found[2]) == disk.PART_BYTES


def test_a_matrix_is_read_whole_in_blocks():
    path = Path("m")
    for start, size in ((4096 * 7, 1_179_648), (4096 * 7 + 32, 1_179_648), (100, 40_000)):
        reads = disk._parts(path, start, size)
        assert len(reads) == (2 if size > disk.PART_BYTES else 1)
        assert reads[0].offset <= start
        assert reads[-1].offset + reads[-1].length >= start + size
        assert all(read.offset % 4096 == read.length % 4096 == 0 for read in reads)
        for one, after in pairwise(reads):
            assert one.offset + one.length == after.offset


def test_the_order_is_that_of_missed_experts(tmp_path):
    model = ExpertModel.open(synthetic.write(tmp_path / "m.gguf", "tiny-olmoe"))
    reads = list(islice(disk._missed(model, 0, random.Random(1)), 2 * 3 * 2))

    def where(read):
        """(layer, kind) whose matrices a read touches."""
        for at, layer in enumerate(model.slices):
            for kind, (piece, *_) in enumerate(layer):
                if piece is None:
                    continue
                end = piece.offset + piece.expert_bytes * model.n_expert
                if piece.offset <= read.offset + 2048 < end:
                    return at, kind
        raise AssertionError(read)

    kinds = [kind for kind in (GATE, UP, DOWN) for _ in range(model.n_expert_used)]
    assert [where(read) for read in reads] == [(at, kind) for at in (0, 1) for kind in kinds]


def test_read_bandwidth_measures_such_reads(tmp_path):
    model = ExpertModel.open(synthetic.write(tmp_path / "m.gguf", "tiny-olmoe"))
    found = disk.read_bandwidth(model, threads=2, seconds=0.05)
    assert found.bytes_per_s > 0
    # Threads that begin when the time is over, as on a busy machine.
    assert disk.read_bandwidth(model, threads=2, seconds=0).bytes_per_s > 0
    assert found.slice_bytes >= model.slices[1][0][0].expert_bytes
