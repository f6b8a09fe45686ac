"""The probe of the disk."""

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator import disk


def test_read_bandwidth_reads_whole_experts(tmp_path):
    model = ExpertModel.open(synthetic.write(tmp_path / "m.gguf", "tiny-olmoe"))
    windows = disk._windows(model, 0)
    assert len(windows) == 3 * 3 * 8
    slices = model.slices[1][0][0]
    start = slices.offset + 5 * slices.expert_bytes
    assert any(
        w.offset <= start
        and w.offset + w.length >= start + slices.expert_bytes
        and w.offset % 4096 == w.length % 4096 == 0
        for w in windows
    )
    found = disk.read_bandwidth(model, threads=2, seconds=0.05)
    assert found.bytes_per_s > 2**20
    assert found.slice_bytes >= slices.expert_bytes
