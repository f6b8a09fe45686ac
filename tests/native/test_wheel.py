"""The complete wheel: its contents, answers without a compiler, and supported processors."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from installed import install, pip, site_of
from installed import run as run_tests
from real_cache import REAL_CACHE

from patches import portable
from patches.upstream import REPO

from . import emulated

DEMO = REPO / "models/demo/moe-edge-demo.gguf"
HANG_S = 1800  # CI compiles everything
QUESTION = ("chat", "-p", "What is the capital of Norway?", "--seed", "1")
MOST_BYTES = 75 * 10**6
# Instructions that a library for a set of instructions must not contain, as printed by objdump:
# those of higher sets, and those of no set (OF_NO_SET).
AVX512 = r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b"
VNNI = r"vpdp(bus|wss)"
OF_NO_SET = (
    r"\b(tdp\w+|\w*tile\w+|vdpbf16ps|vcvtne\w+|vperm[it]2b|vpermb|vpmultishiftqb|gf2p8\w+|sha\d\w+|"
    r"vaes\w+|vpclmul\w+)\b"
)
NEVER = {"avx2": (AVX512, VNNI), "avx_vnni": (AVX512,), "avx512_vnni": ()}
# These functions first check whether the processor has the instructions.
CHECKED = re.compile(r"fold|by_products")
SOME_TESTS = (
    *("tests/unit/gguf/test_built.py", "tests/unit/gguf/test_pack.py"),
    *("tests/native/test_lossless.py", "tests/native/test_server_library.py"),
    "tests/native/test_executor.py::test_model_without_python",
)
# Folder into which `pip install --target` installed llama-cpp-python.
PYPI = os.environ.get("MOE_EDGE_PYPI", "")
BESIDE = """
import sys
def ours():
    from orchestrator.cli.main import cli
    cli(["chat", "-p", "What is the capital of Norway?", "--seed", "1"], standalone_mode=False)
def theirs():
    from llama_cpp import Llama
    question = [{"role": "user", "content": "What is the capital of Norway?"}]
    answer = Llama(sys.argv[2], n_ctx=256, verbose=False).create_chat_completion(
        question, temperature=0
    )
    print(answer["choices"][0]["message"]["content"])
for answer in (ours, theirs) if sys.argv[1] == "ours" else (theirs, ours):
    answer()
with open("/proc/self/maps") as maps:
    print(*{line.split("/")[-1].strip() for line in maps if ".so" in line})
"""
THROWER = """
#include <stdexcept>
extern "C" bool thrower(float, void *) { throw std::runtime_error("from another library"); }
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """CI builds the wheel. Otherwise it is taken from dist/."""
    for path in (REPO / "dist").glob(f"moe_edge-*{portable.tag()}.whl"):
        with zipfile.ZipFile(path) as archive:
            stamp = archive.read(f"{portable.PACKAGE}/moe_edge_build.json")
        if portable.digest_of_patches().encode() in stamp:
            return path
    if not os.environ.get("CI"):
        pytest.skip("dist/ has no wheel of this checkout: run `make wheel`")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(REPO / "patches/tool.py"), "wheel", "--folder", str(folder)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(REAL_CACHE.parent)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Python of an environment in which the wheel is installed."""
    return install(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture
def run(python, tmp_path):
    """run(*arguments, by=(), **environment): run the installed Python with an empty PATH."""

    def call(*arguments, by=(), **environment):
        clean = {"PATH": "", "HOME": str(tmp_path), **environment}
        return subprocess.run(
            [*by, str(python), *arguments],
            env=clean,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    yield call


def test_files_and_size_of_the_wheel(wheel):
    name, version, tag = wheel.stem.split("-", 2)
    assert (name, tag) == ("moe_edge", portable.tag()) and "+" not in version
    assert wheel.stat().st_size <= MOST_BYTES
    info = f"moe_edge-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {each.split("/")[0] for each in names} == {"gguf_tools", "orchestrator", info}
        recorded = dict(
            line.rsplit(",", 2)[:2]
            for line in archive.read(f"{info}/RECORD").decode().splitlines()
            if not line.startswith(info)
        )
        for each in recorded:
            digest = hashlib.sha256(archive.read(each)).digest()
            assert recorded[each] == f"sha256={urlsafe_b64encode(digest).decode().rstrip('=')}"
        libraries = {Path(each).name for each in names if ".so" in each}
    assert libraries == {
        *("libllmoe.so", "libgmoe.so", "libgmoe-base.so", "libgmoe-cpu.so"),
        *("libmoe-edge-server.so", "libgomp.so.1"),
    }
    texts = {each.removeprefix(f"{info}/licenses/") for each in names if "/licenses/" in each}
    assert {"LICENSE", "LICENSE.llama.cpp", "LICENSE.md", "LICENSE-jsonhpp"} <= texts
    assert {"LICENSE.sha256", "LICENSE.xxhash"} <= texts
    assert sum("gcc-runtime" in each for each in texts) == 2


def test_it_answers_and_reports_its_instruction_set(run):
    done = run("-m", "orchestrator", *QUESTION)
    assert "Oslo" in done.stdout, done.stderr
    found = run("-m", "orchestrator", "--version").stdout
    assert re.search(rf"\(({'|'.join(portable.SETS)})\)$", found), found


def test_readmes_lines_of_python_print_only_the_answer(run):
    lines = re.search("```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)[1]
    done = run("-c", lines.replace("MODEL.gguf", str(DEMO)) + "\nassert answer.tokens > 1\n")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip(), done


def test_the_server_needs_no_compiler(run, tmp_path):
    code = """
from orchestrator.native.llama import Bindings
from orchestrator.native import server_library
server_library(Bindings.load())
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".cache").exists()


def test_an_unsupported_processor_is_refused(run):
    done = run("-m", "orchestrator", *QUESTION, GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX2")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: this processor lacks avx2") and "\n" not in (
        done.stderr.strip()
    )


@pytest.mark.parametrize("others", ["make build's", "PyPI's"])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_it_answers_next_to_another_llama_cpp(run, others, first, tmp_path):
    """The wheel and another llama.cpp answer in one process, in either order.

    Both have libraries of the same names.
    """
    if others == "PyPI's" and not PYPI:
        pytest.skip("MOE_EDGE_PYPI is not set: `pip install --target FOLDER llama-cpp-python`")
    stock = tmp_path / "stock.gguf"
    made = run("-m", "orchestrator", "export", "--tier", "q8_0", str(DEMO), str(stock))
    assert made.returncode == 0, made.stderr
    done = run("-c", BESIDE, first, str(stock), PYTHONPATH=PYPI if others == "PyPI's" else "")
    assert done.returncode == 0 and done.stdout.count("Oslo") == 2, done
    loaded = set(re.findall(r"\blib\w+-cpu\.so", done.stdout))
    assert {"libggml-cpu.so", "libgmoe-cpu.so"} <= loaded


def test_an_exception_of_another_library_is_caught(run, tmp_path):
    """An exception that another library throws in a callback is caught.

    Each library has its own libstdc++, and so does the one that throws.
    """
    source, library = tmp_path / "thrower.cpp", tmp_path / "libthrower.so"
    source.write_text(THROWER)
    flags = portable.LINKED.partition("=")[2].split()[:-1]
    command = ["c++", "-shared", "-fPIC", *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    code = """
import ctypes, sys
from orchestrator.cli.options import demo_model
from orchestrator.native.llama import Bindings
bindings = Bindings.load()
api = bindings.api
params = api.llama_model_default_params()
thrower = ctypes.CDLL(sys.argv[1]).thrower
params.progress_callback = ctypes.cast(thrower, api.llama_progress_callback)
for _ in range(3):
    print(api.llama_model_load_from_file(str(demo_model()).encode(), params), bindings.complaint())
"""
    done = run("-c", code, str(library))
    assert done.stdout.count("None") == 3 and "from another library" in done.stdout, done


def test_some_tests_of_the_build_pass_with_the_wheel(wheel, tmp_path, real_cache):
    """A few tests of each kind pass with the wheel. tests/helpers/installed.py runs any others."""
    assert run_tests(wheel, ["-q", "-m", "not rest", *SOME_TESTS], tmp_path) == 0


@pytest.mark.skipif(not shutil.which("objdump"), reason="objdump is missing")
def test_no_set_has_an_instruction_of_a_higher_one(python):
    folder = site_of(python.parents[1]) / portable.PACKAGE / "lib"
    for path in sorted(folder.rglob("*.so*")):
        name = path.parent.name if path.parent != folder else "avx2"
        never = re.compile("|".join((*NEVER[name], OF_NO_SET)))
        found, function = set(), ""
        command = ["objdump", "-d", "--no-show-raw-insn", "--demangle", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            text = ""
            for line in process.stdout:
                if line.endswith(">:\n"):
                    function = line
                # The text after an address is the name of a symbol.
                elif never.search(re.split("[<#]", line)[0]) and not CHECKED.search(function):
                    found.add((function, line.strip()))
                elif path.parent != folder and not text and "vpdpbusd" in line:
                    text = line
        assert not found, f"{path.name} of {name}: {sorted(found)[:5]}"
        assert path.parent == folder or bool(text) == (name != "avx2"), name


def test_the_least_set_on_an_older_processor(run):
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is missing: `sudo apt install qemu-user`")
    done = run("-m", "orchestrator", *QUESTION, by=(emulator, "-cpu", "Haswell"))
    assert "Oslo" in done.stdout, done.stderr


@pytest.mark.parametrize("name", emulated.PROGRAMS)
def test_programs_of_the_least_set_on_an_older_processor(name, python, llama_source, tmp_path):
    if name == "executor_test" and not os.environ.get("MOE_EDGE_SLOW"):
        pytest.skip("takes minutes in an emulator: set MOE_EDGE_SLOW=1")
    folder = site_of(python.parents[1]) / portable.PACKAGE / "lib"

    def library(each):
        own = portable.NAMES[f"lib{each}.so".encode()].decode()
        return folder / ("avx2" if each == "ggml-cpu" else "") / own

    by = emulated.emulator("qemu-x86_64", "-cpu", "Haswell")
    emulated.check(name, by, "c++", ("-march=haswell",), library, llama_source, tmp_path)


@pytest.fixture
def cuda(python, tmp_path):
    """The folder of an installed replacement of moe-edge-cuda.

    It has the wheel's own library instead of one with CUDA.
    """
    folder = site_of(python.parents[1]) / portable.PACKAGE / "lib"
    pip(python, "install", "--no-deps", "--no-index", str(stand_in(folder, tmp_path)))
    yield folder / "cuda"
    pip(python, "uninstall", "--yes", "moe-edge-cuda")
    assert not (folder / "cuda").exists()


def stand_in(folder, target):
    """Write a wheel of moe-edge-cuda with the libraries of the CPU wheel."""
    (target / "libggml.so").write_bytes((folder / "libgmoe.so").read_bytes())
    return portable.write_cuda([target / "libggml.so"], 13, {}, target)


def test_an_installed_moe_edge_cuda_is_used(run, cuda):
    code = (
        "from orchestrator.native.llama import Bindings; Bindings.load(); "
        "print(open('/proc/self/maps').read())"
    )
    done = run("-c", code)
    loaded = {line.split()[-1] for line in done.stdout.splitlines() if "libgmoe.so" in line}
    assert loaded == {str(cuda / "libgmoe.so")}, done
    assert "Oslo" in run("-m", "orchestrator", *QUESTION).stdout
    damages = {
        "libgmoe.so": ("", "llama.cpp cannot be loaded"),
        portable.STAMP: (
            '{"patches": "others"}',
            "moe-edge-cuda and moe-edge have different versions:",
        ),
    }
    for name, (text, why) in damages.items():
        (cuda / name).write_text(text)
        done = run("-m", "orchestrator", *QUESTION)
        assert done.returncode == 1 and done.stderr.startswith(f"Error: {why}")
        assert len(done.stderr.splitlines()) == 1 and "moe-edge-cuda" in done.stderr
