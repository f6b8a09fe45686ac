"""llama.cpp as published by upstream, without our patches, for comparisons.

A build has the library and the programs in TARGETS.

    python tests/helpers/unpatched.py FOLDER       builds them from the pinned source: minutes
    MOE_EDGE_UNPATCHED=FOLDER python -m pytest tests/unit/convert/test_unpatched.py
    MOE_EDGE_UNPATCHED=FOLDER python -m pytest tests/native/test_images.py

Without this variable, the tests that need the build are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
VARIABLE = "MOE_EDGE_UNPATCHED"
# Read at import, because each test gets an environment without such variables.
FOLDER = os.environ.get(VARIABLE)
TARGETS = ("llama", "llama-quantize", "llama-imatrix", "llama-mtmd-cli")


def build(folder):
    """Unpack the pinned source without patches, and compile it with the installed library's flags.

    Raises BuildError or CalledProcessError.
    """
    from orchestrator.native.llama import Bindings
    from patches.upstream import BuildError, cached_sdist, read_upstream, sha256_file

    upstream = read_upstream()
    sdist = cached_sdist(upstream)
    if sdist is None or sha256_file(sdist) != upstream.sha256:
        raise BuildError("the pinned source is not in the cache: run `make build`")
    package = Path(Bindings.load().api.__file__).parent
    flags = json.loads((package / "moe_edge_build.json").read_text())["flags"]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    command = ["cmake", "-S", str(folder / "source" / upstream.base / upstream.source)]
    command += ["-B", str(folder / "build"), *(f"-D{flag}" for flag in flags)]
    command += [f"-D{each}" for each in ("LLAMA_BUILD_COMMON=ON", "LLAMA_BUILD_TOOLS=ON")]
    command += ["-DGGML_CUDA=OFF", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=OFF"]
    subprocess.run(command, check=True)
    jobs = str(os.cpu_count() or 1)
    command = ["cmake", "--build", str(folder / "build"), "--parallel", jobs, "--target", *TARGETS]
    subprocess.run(command, check=True)


@dataclass(frozen=True)
class Choice:
    """A token of a greedy answer, and by how much its logit exceeds that of the second best."""

    token: int
    lead: float


class Unpatched:
    """A folder with a build of unpatched llama.cpp."""

    def __init__(self, folder):
        self.bin = folder / "build" / "bin"

    def logits(self, model, prompt, answer):
        """Return the logits of a prompt and an answer, float32 [prompt + answer, vocab].

        The prompt is read in one step, then each token in its own. Runs in a separate process.
        Raises AssertionError with its output.
        """
        out = model.with_suffix(".npy")
        command = [sys.executable, __file__, "--logits", model, out, json.dumps([prompt, answer])]
        self._run(command, LLAMA_CPP_LIB_PATH=str(self.bin), PYTHONPATH=str(REPO))
        return np.load(out)

    def about_image(self, model, mmproj, image, prompt, *options):
        """Return llama-mtmd-cli's greedy answer to a prompt about an image file, list of Choice.

        The answer of a random model is no text, so it is read from the logits that the program
        samples from. options: further arguments of the program.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source, library = Path(__file__).with_name("best_logits.c"), folder / "best_logits.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
            command = [self.bin / "llama-mtmd-cli", "-m", model, "--mmproj", mmproj]
            command += ["--image", image, "-p", prompt, "--jinja", "--temp", 0, *options]
            found = folder / "best"
            self._run(command, LD_PRELOAD=str(library), BEST_LOGITS=str(found))
            rows = [line.split() for line in found.read_text().splitlines()]
        return [Choice(int(row[0]), float(row[1]) - float(row[3])) for row in rows]

    def tool(self, name, *arguments):
        """Run one of upstream's programs and return its output. Raises AssertionError."""
        return self._run([self.bin / name, *arguments])

    def _run(self, command, **environment):
        words, env = [str(each) for each in command], {**os.environ, **environment}
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
        done = subprocess.run(words, env=env, text=True, **both)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout


def find():
    """Return the build that the environment names, or the reason why there is none."""
    if not FOLDER:
        return f"needs upstream without our patches: {VARIABLE}, see tests/helpers/unpatched.py"
    return Unpatched(Path(FOLDER))


def _logits(model, out, prompt, answer):
    """Compute logits as for a model without managed experts. Runs in the separate process."""
    from orchestrator.native.llama import Bindings, LlamaContext, Model

    bindings = Bindings.load()
    lib = bindings.api._lib
    if Path(lib._name).parent != Path(os.environ["LLAMA_CPP_LIB_PATH"]):
        sys.exit(f"{lib._name} is another library")
    if hasattr(lib, "moe_edge_abi_version"):
        sys.exit(f"{lib._name} has our patches")
    opened = Model(bindings, model, managed=False, use_extra_bufts=False, use_mmap=True)
    sizes = {"n_ctx": 256, "n_ubatch": 256, "outputs": 256}
    context = LlamaContext(bindings, opened, threads=1, flash_attention=True, **sizes)
    rows = []
    for pos, tokens in [(0, prompt), *((len(prompt) + i, [t]) for i, t in enumerate(answer))]:
        if context.decode(tokens, pos, all_logits=True) != 0:
            sys.exit(f"{model}: cannot be decoded")
        rows.append(context.logits(len(tokens)).copy())
    context.close()
    opened.close()
    np.save(out, np.concatenate(rows))


def main():
    if sys.argv[1:2] == ["--logits"]:
        prompt, answer = json.loads(sys.argv[4])
        _logits(Path(sys.argv[2]), Path(sys.argv[3]), prompt, answer)
    elif len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        folder = Path(sys.argv[1]).resolve()
        shutil.rmtree(folder / "source", ignore_errors=True)
        sys.path[:0] = [str(REPO)]
        build(folder)
        print(f"export {VARIABLE}={folder}")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
