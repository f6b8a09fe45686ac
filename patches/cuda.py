"""cmake flags for CUDA, and a CUDA toolkit completed with cuBLAS if cuBLAS is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from patches import probe
from patches.upstream import BuildError, cache_dir, say

# On a machine without a GPU, build PTX code that drivers compile for any GPU since Ampere.
DEFAULT_ARCH = 80


def flags(arch: str | None) -> tuple[list[str], list[str]]:
    """Return the cmake definitions for a build with CUDA, and the folders of CUDA's libraries.

    Raises BuildError if nvcc is missing or unsuitable, or if cuBLAS cannot be found or downloaded.

    arch: CUDA architectures, such as "86-real". Default: those of this machine's GPUs.
    """
    nvcc = probe.need_nvcc()
    root = probe.toolkit_root(nvcc)
    header = "include/cublas_v2.h"
    if not (root / header).exists() and not any(root.glob(f"targets/*/{header}")):
        root = overlay(root, nvcc)
    libraries = [str(path) for path in (root / "lib64", root / "lib") if path.is_dir()][:1]
    definitions = [
        "GGML_CUDA=ON",
        "GGML_CUDA_NO_VMM=ON",
        "GGML_CUDA_NCCL=OFF",
        "GGML_CUDA_FA=ON",
        f"CUDAToolkit_ROOT={root}",
        f"CMAKE_CUDA_COMPILER={nvcc}",
        f"CMAKE_CUDA_ARCHITECTURES={arch or architectures(nvcc, gpu_capabilities())}",
    ]
    return definitions, libraries


def architectures(nvcc: str, capabilities: Iterable[int]) -> str:
    """Return the value of CMAKE_CUDA_ARCHITECTURES for GPUs of these compute capabilities.

    For GPUs that nvcc supports, the value names machine code, such as "89-real". For newer GPUs it
    names virtual code, which the driver compiles when the library is first loaded. Raises
    BuildError for a GPU that nvcc no longer supports.

    capabilities: numbers such as 89.
    """
    offered = offered_architectures(nvcc)
    return ";".join(dict.fromkeys(_code_for(each, offered) for each in capabilities)) or (
        f"{DEFAULT_ARCH if DEFAULT_ARCH in offered else offered[-1]}-virtual"
    )


def _code_for(capability: int, offered: list[int]) -> str:
    if capability in offered:
        return f"{capability}-real"
    older = [each for each in offered if each < capability]
    if not older:
        raise BuildError(
            f"the GPU has compute capability {capability // 10}.{capability % 10}, but this CUDA "
            f"toolkit only supports {offered[0] // 10}.{offered[0] % 10} and newer: install an "
            "older toolkit and set CUDA_HOME to it, or build with GPU=off."
        )
    say(
        f"this CUDA toolkit does not support the GPU's compute capability {capability // 10}."
        f"{capability % 10}: the driver will compile the code at the first start, which takes "
        "minutes"
    )
    return f"{older[-1]}-virtual"


def offered_architectures(nvcc: str) -> list[int]:
    """Return the compute capabilities that nvcc supports, such as 86, in increasing order.

    Raises BuildError if nvcc does not list any.
    """
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    found = sorted(int(number) for number in re.findall(r"^compute_(\d+)$", done.stdout, re.M))
    if done.returncode != 0 or not found:
        raise BuildError(
            f"{nvcc} --list-gpu-arch lists no architecture: install CUDA 11.5 or newer, or set the "
            "architecture, such as CUDA_ARCH=86-real."
        )
    return found


def gpu_capabilities() -> list[int]:
    """Return the compute capabilities of this machine's GPUs, such as 86, in increasing order.

    The list is empty if there is no GPU or nvidia-smi does not answer.
    """
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return []
    found = re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE)
    return sorted({int(major) * 10 + int(minor) for major, minor in found})


def overlay(root: Path, nvcc: str) -> Path:
    """Return a folder with a complete CUDA toolkit, made from a toolkit without cuBLAS.

    The folder has links to the toolkit's files, and cuBLAS from an installed Python package. If no
    such package is installed, cuBLAS is downloaded from PyPI. The folder is kept in the cache, one
    for each version of the toolkit.

    root: folder of the toolkit.
    """
    version = probe.nvcc_version(nvcc)
    target = cache_dir() / "cuda" / f"{version}-cublas"
    if (target / "include" / "cublas_v2.h").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".overlay.") as folder:
        numbers = version.split(".")[:2]
        installed = _installed(int(numbers[0]))
        wheel = None if installed else _download(numbers, Path(folder))
        stage = Path(folder) / "tree"
        for name in ("include", "lib"):
            (stage / name).mkdir(parents=True)
            for path in (root / name).iterdir():
                (stage / name / path.name).symlink_to(path)
        for name in ("bin", "nvvm"):
            if (root / name).exists():
                (stage / name).symlink_to(root / name)
        for path in installed:
            place = stage / path.parent.name / path.name
            place.unlink(missing_ok=True)
            place.symlink_to(path)
        if wheel is not None:
            _unpack(wheel, stage)
        for path in list((stage / "lib").glob("lib*.so.*")):
            plain = path.with_name(path.name.split(".so")[0] + ".so")
            if not plain.exists():
                plain.symlink_to(path.name)
        (stage / "lib64").symlink_to("lib")
        if target.exists():
            shutil.rmtree(target)
        os.replace(stage, target)
    return target


def _installed(major: int) -> list[Path]:
    """Return the headers and libraries of cuBLAS from an installed Python package.

    Return an empty list if no such package is installed for this CUDA version.

    major: the major version of CUDA.
    """
    roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        base = Path(os.environ.get(variable) or os.devnull)
        roots += map(str, base.glob("lib/python3*/site-packages"))
    for root in dict.fromkeys(roots):
        # CUDA 13 has one folder cu13 for all packages, earlier versions one folder per package.
        for folder in (Path(root) / f"nvidia/cu{major}", Path(root) / "nvidia/cublas"):
            libraries = sorted(folder.glob(f"lib/libcublas*.so.{major}"))
            headers = sorted(folder.glob("include/cublas*.h"))
            if libraries and folder / "include" / "cublas_v2.h" in headers:
                say(f"this CUDA toolkit has no cuBLAS: using the one in {folder}")
                return libraries + headers
    return []


def _unpack(wheel: Path, stage: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            match = re.search(r"/(include|lib)/([^/]+)$", entry)
            if match and not match[2].startswith("__"):
                place = stage / match[1] / match[2]
                place.unlink(missing_ok=True)
                with archive.open(entry) as source, place.open("wb") as copy:
                    shutil.copyfileobj(source, copy)


def _download(version: list[str], folder: Path) -> Path:
    major, minor = int(version[0]), int(version[1])
    # Up to CUDA 12 the package's name includes the major version.
    name = "nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}"
    say(f"this CUDA toolkit has no cuBLAS: downloading {name} for CUDA {major}.{minor}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    # cuBLAS packages have the version of their CUDA toolkit.
    command.append(f"{name}>={major}.{minor},<{major}.{minor + 1}")
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise BuildError(
            "cuBLAS is missing from the CUDA toolkit and could not be downloaded: install "
            f"libcublas-dev-{major}-{minor} from NVIDIA's package repository."
        )
    return wheels[0]
