"""A conversion that is killed (SIGKILL) at any point: a file with the final name is complete."""

from killing import check_model_at_twenty_deaths

from gguf_tools.convert import convert

from . import checkpoints

# Upstream's converter and torch load before the first byte is written. Most kills should happen
# after that.
OURS = tuple(
    f"gguf_tools.{name}"
    for name in (
        *("convert.converting", "convert.lazy", "pack"),
        *("file.unfinished", "file.chunks", "progress", "workers", "file.writer"),
    )
)


def test_killed_at_twenty_moments(tmp_path):
    checkpoints.write_checkpoint("qwen3-moe", tmp_path / "hf")
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()

    def work():
        convert(tmp_path / "hf", out, ["f16", "q8_0"], threads=2)

    work()  # loads modules before the child processes are forked
    check_model_at_twenty_deaths(work, out, OURS, seed=3)
