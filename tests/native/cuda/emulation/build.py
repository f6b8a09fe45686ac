"""Build ggml's CUDA backend, with our patches and sources, for the emulated GPU.

The result is a libggml-cuda.so for `ggml_backend_load`, compiled by g++ against the emulation in
this folder. Objects are cached by the content of all their inputs. A call of a function that was
not compiled ends the process with the function's name.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .preprocess import emulated, fewer_tiles

HERE = Path(__file__).parent
CUDA = "ggml/src/ggml-cuda"
NATIVE = "moe-edge"
KEEP = 400  # maximum number of objects and libraries in the cache

# The device reports compute capability 8.9. The code is compiled for one with fast half precision
# and no matrix instructions, as if its PTX were for an older GPU.
ARCHITECTURE = 720
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-x", "c++"),
    *(f"-D__CUDA_ARCH__={ARCHITECTURE}", f"-D__CUDA_ARCH_LIST__={ARCHITECTURE}"),
    *("-DGGML_CUDA_NO_VMM", "-DGGML_CUDA_NO_FA", "-DGGML_CUDA_USE_GRAPHS"),
    # otherwise upstream multiplies larger batches with cuBLAS if there are no matrix instructions
    "-DGGML_CUDA_FORCE_MMQ",
    *("-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED"),
    *("-DGGML_SCHED_MAX_COPIES=4", "-DGGML_CUDA_PEER_MAX_BATCH_SIZE=128"),
)

# A GPU cannot load values that are not aligned to their type, but this CPU can. The check is
# compiled into our sources and into those that get addresses from them. It doubles the compile time
# of a source.
ALIGNED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")

# Sources for MUL_MAT_ID. The MMQ instances of its types are added.
CORE = ("ggml-cuda.cu", "convert.cu", "mmid.cu", "mmq.cu", "mmvq.cu", "quantize.cu")

# Further sources that a complete model needs.
MODEL_SOURCES = (
    *("add-id.cu", "argsort.cu", "binbcast.cu", "concat.cu", "cpy.cu", "fwht.cu", "getrows.cu"),
    *("mmf.cu", "mmvf.cu", "moe-weighted-reduction.cu", "norm.cu", "rope.cu", "scale.cu"),
    *("set-rows.cu", "softmax.cu", "sumrows.cu", "topk-moe.cu", "unary.cu"),
)
MODEL_TYPES = ("q2_k", "q4_k", "q8_0")


@dataclass(frozen=True)
class Compiler:
    path: str
    identity: str


def find_compiler():
    path = shutil.which("g++")
    if path is None or shutil.which("nm") is None:
        return None
    command = [path, "-v"]
    done = subprocess.run(command, capture_output=True, text=True)
    return Compiler(path, done.stderr)


def mmq_instances(types):
    return [f"template-instances/mmq-instance-{name}.cu" for name in types]


def read_tree(llama):
    """Return the CUDA sources and headers of a patched llama.cpp, converted for g++, by path."""
    tree = {}
    for path in sorted((llama / CUDA).rglob("*.cu*")):
        tree[f"{CUDA}/{path.relative_to(llama / CUDA)}"] = fewer_tiles(emulated(path.read_text()))
    tree[f"{CUDA}/vendors/cuda.h"] = (llama / CUDA / "vendors/cuda.h").read_text()
    for path in sorted((llama / NATIVE).iterdir()):
        if path.suffix in (".cu", ".h"):
            tree[f"{NATIVE}/{path.name}"] = emulated(path.read_text())
    return tree


def included(name, tree):
    """Return a file of the tree and all that it includes.

    Every file with an included name counts.
    """
    found, todo = {name}, [name]
    while todo:
        names = set(re.findall(r'^\s*#\s*include\s+"(?:.*/)?([^"/]+)"', tree[todo.pop()], re.M))
        more = {path for path in tree if path.rsplit("/", 1)[-1] in names} - found
        found |= more
        todo += more
    return found


def build_backend(compiler, tree, llama, libraries, sources, store):
    """Build libggml-cuda.so of `sources` (names in ggml-cuda/) and all our .cu files.

    llama: the tree that `tree` was read from. libraries: the folder of libggml-base.so. store:
    cache of objects and results. Raises RuntimeError with the compiler's output.
    """
    store.mkdir(parents=True, exist_ok=True)
    own = [name for name in tree if name.startswith(NATIVE) and name.endswith(".cu")]
    names = [f"{CUDA}/{name}" for name in sources] + own
    shim = _digest(path.read_text() for path in sorted(HERE.rglob("*.h")))
    common = (compiler.identity, *FLAGS, shim)
    checked = {f"{CUDA}/{name}" for name in CORE} | set(own)
    objects, flags = {}, {}
    for name in names:
        texts = (tree[each] for each in sorted(included(name, tree)))
        flags[name] = ALIGNED if name in checked or "mmq-instance" in name else ()
        digest = _digest([*common, *flags[name], *texts])
        objects[name] = store / f"{Path(name).stem}-{digest[:20]}.o"
    engine = HERE / "emulation.cpp"
    objects["emulation.cpp"] = store / f"emulation-{_digest([*common, engine.read_text()])[:20]}.o"
    missing = [name for name, path in objects.items() if not path.exists()]
    if missing:
        with tempfile.TemporaryDirectory(prefix="moe-edge-emulation-") as folder:
            root = Path(folder)
            for name, text in tree.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            shutil.copy(engine, root)

            def compile_one(name):
                includes = [f"{root}/ggml/src", f"{root}/{CUDA}", str(HERE)]
                includes += [f"{llama}/ggml/include", f"{llama}/ggml/src"]
                unfinished = objects[name].with_suffix(f".{os.getpid()}")
                command = [compiler.path, *FLAGS, *flags.get(name, ())]
                command += [f"-I{path}" for path in includes]
                _run([*command, "-c", str(root / name), "-o", str(unfinished)])
                os.replace(unfinished, objects[name])

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile_one, missing))
    for path in objects.values():
        os.utime(path)
    key = _digest([*sorted(path.name for path in objects.values()), str(libraries)])
    library = store / key[:20] / "libggml-cuda.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        _link(compiler, list(objects.values()), libraries, library)
    os.utime(library.parent)
    _prune(store)
    return library


def _link(compiler, objects, libraries, library):
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        stubs, unfinished = Path(folder) / "stubs.c", Path(folder) / library.name
        command = [compiler.path, "-shared", "-o", str(unfinished), *map(str, objects)]
        command += [f"-L{libraries}", "-lggml-base", f"-Wl,-rpath,{libraries}", "-pthread"]
        done = subprocess.run(
            [*command, "-Wl,-z,defs,--no-demangle"], capture_output=True, text=True
        )
        names = sorted(set(re.findall(r"undefined reference to `(\w+)'", done.stderr)))
        lines = ["void moe_emu_missing(const char * name);"]
        for i, name in enumerate(names):
            lines.append(f'void stub_{i}(void) __asm__("{name}");')
            lines.append(f'void stub_{i}(void) {{ moe_emu_missing("{name}"); }}')
        stubs.write_text("\n".join(lines) + "\n")
        _run([*command, "-fPIC", "-x", "c", str(stubs), "-Wl,-z,defs"])
        os.replace(unfinished, library)


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[:4000])


def _digest(parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _prune(store):
    entries = sorted(store.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[KEEP:]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
