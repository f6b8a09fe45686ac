"""Convert a checkpoint to GGUF with `python -m models.demo.training.convert HF_DIR OUT.gguf ...`.

Runs llama.cpp's converter, which recognizes pre-tokenizers by a hash of the tokens of a test text
and therefore does not know a newly trained vocabulary. This wrapper compares the pre-tokenizer's
rules instead, as `moe-edge convert` does.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from gguf_tools.convert.pretokenizer import pre_tokenizer

MISSING = "conversion needs torch and transformers: python3 patches/tool.py setup --extras convert"


NAME = "moe-edge demo"


def convert(hf_dir: Path, out: Path, upstream: Path, outtype: str = "f16") -> None:
    """Convert a Hugging Face checkpoint in the folder `hf_dir` to the GGUF file `out`.

    `upstream` is the folder of llama.cpp, which contains the converter. `outtype` is the type of
    the matrices.
    """
    script = upstream / "convert_hf_to_gguf.py"
    if not script.is_file():
        raise SystemExit(
            f"{upstream}: convert_hf_to_gguf.py not found; give the folder of llama.cpp"
        )
    sys.path[:0] = [str(upstream), str(upstream / "gguf-py")]
    try:
        from conversion import base  # type: ignore[import-not-found]
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "transformers", "numpy", "sentencepiece", "safetensors"):
            raise
        raise SystemExit(MISSING) from None

    known = base.TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        return pre_tokenizer(Path(self.dir_model)) or str(known(self, tokenizer))

    base.TextModel.get_vocab_base_pre = get_vocab_base_pre
    argv = sys.argv
    sys.argv = [str(script), str(hf_dir), "--outfile", str(out), "--outtype", outtype]
    sys.argv += ["--model-name", NAME]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
        base.TextModel.get_vocab_base_pre = known


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m models.demo.training.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("hf_dir", type=Path, help="checkpoint folder")
    p.add_argument("out", type=Path, help="the GGUF file to write")
    p.add_argument("--upstream", type=Path, required=True, help="llama.cpp's source folder")
    p.add_argument("--outtype", default="f16", choices=("f32", "f16", "bf16", "q8_0"))
    args = p.parse_args(argv)
    convert(args.hf_dir, args.out, args.upstream, args.outtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
