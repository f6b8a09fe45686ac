"""Parts of the portable wheel. tests/native/test_wheel.py tests the complete wheel."""

import json
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from tables import cases

from gguf_tools import built
from orchestrator.serve.views import SCRIPTS
from patches import portable, wheel
from patches.upstream import BuildError, read_upstream

STAMP = f"{portable.PACKAGE}/moe_edge_build.json"


def test_each_compiled_instruction_set_can_be_chosen():
    found = {machine: set(sets) for machine, sets in built.SETS_OF.items()}
    assert found == {machine: set(sets) for machine, sets in portable.SETS_OF.items()}


def test_wheel_contains_only_our_packages_and_the_demo():
    names = portable.our_files()
    assert {name.split("/")[0] for name in names} == {"gguf_tools", "orchestrator"}
    assert "orchestrator/models/demo/moe-edge-demo.gguf" in names
    assert "gguf_tools/known/models.json" in names
    for part in ("page.html", "page.css", *SCRIPTS):
        assert f"orchestrator/serve/page/{part}" in names
    assert "orchestrator/lab/calibrate/text/prose.txt" in names


def test_metadata_requires_all_but_the_bindings():
    about = BytesParser().parsebytes(portable.metadata(read_upstream()))
    needed = about.get_all("Requires-Dist")
    assert "+" not in about["Version"] and about["Name"] == "moe-edge"
    assert not any(each.startswith("llama") for each in needed)
    assert {"plot", "convert", "eval"} <= set(about.get_all("Provides-Extra"))
    assert 'matplotlib>=3.8; extra == "plot"' in needed and "click>=8.2" in needed
    assert about.get_payload().startswith("# moe-edge")
    assert portable.entry_points() == (
        b"[console_scripts]\nmoe-edge = orchestrator.__main__:main\n"
    )


def test_only_complete_library_names_are_replaced(tmp_path):
    library = tmp_path / "libx.so"
    text = b"GLIBC_2.2.5\0libggml.so\0libggml-cpu.so\0libllama.so\0libgomp.so.1\0not-libllama.so\0"
    library.write_bytes(text)
    found = portable.portable(library)
    assert found == (
        b"GLIBC_2.2.5\0libgmoe.so\0libgmoe-cpu.so\0libllmoe.so\0libgomp.so.1\0not-libllama.so\0"
    )


@cases(
    "text, needs",
    (b"GLIBC_2.34\0GLIBC_2.36\0", "GLIBC_2.36"),
    (b"libstdc++.so.6\0", r"libstdc\+\+"),
)
def test_a_library_with_requirements_beyond_the_wheels_tag_is_refused(text, needs, tmp_path):
    library = tmp_path / "libx.so"
    library.write_bytes(text)
    with pytest.raises(BuildError, match=rf"^libx.so needs {needs}, which manylinux_2_34"):
        portable.portable(library)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_wheel(folder, **changes):
    """Write a wheel of moe-edge with one library of one byte."""
    stamp = {"patches": portable.digest_of_patches(), "key": "k" * 64, "sets": ["avx2"], **changes}
    entries = {
        STAMP: wheel.as_json(stamp),
        f"{portable.PACKAGE}/lib/avx2/libgmoe-cpu.so": b"1",
        "orchestrator/__init__.py": b"",
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"moe_edge-1.0-{portable.tag()}.whl"
    wheel.write_archive(path, entries, {"METADATA": b"Name: x\n", "licenses/LICENSE": b"MIT"})
    return path


def test_a_checkout_uses_libraries_of_its_own_patches(tmp_path, cache):
    write_wheel(tmp_path / "one", patches="others")
    (tmp_path / "one" / f"moe_edge-0.9-{portable.tag()}.whl").write_bytes(b"PK")
    (tmp_path / "one" / f"moe_edge-0.8-{portable.tag()}.whl").write_bytes(b"")
    upstream, folders = read_upstream(), [tmp_path / "none", tmp_path / "one"]
    assert portable.prebuilt(upstream, folders) is None
    write_wheel(tmp_path / "two")
    found = portable.prebuilt(upstream, [*folders, tmp_path / "two"])
    assert found is not None and found[1] == "k" * 64
    with zipfile.ZipFile(found[0]) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
        assert names == {wheel.STAMP, "llama_cpp/lib/avx2/libgmoe-cpu.so"}
        assert json.loads(archive.read(wheel.STAMP))["key"] == found[1]
        info = f"llama_cpp_python-{upstream.local_version}.dist-info"
        assert f"Version: {upstream.local_version}\n" in archive.read(f"{info}/METADATA").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == b"MIT"


def test_the_cuda_wheel_has_the_differences_and_the_same_version(tmp_path):
    paths = [tmp_path / name for name in portable.WITH_CUDA]
    for path in paths:
        path.write_bytes(b"GLIBC_2.34\0libggml-cuda.so\0libcudart.so.13\0")
    made = portable.write_cuda(paths, 13, {"licenses/LICENSE.md": b"MIT"}, tmp_path / "dist")
    place, version = f"{portable.PACKAGE}/lib/cuda", portable.project()["version"]
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    stamp = json.loads(files[f"{place}/{built.STAMP}"])
    assert stamp == {"patches": portable.digest_of_patches()} and Path(place).name == built.CUDA
    assert files[f"{place}/libgmoe-cuda.so"] == b"GLIBC_2.34\0libgmoe-cuda.so\0libcudart.so.13\0"
    info = f"moe_edge_cuda-{version}.dist-info"
    assert {name for name in files if info not in name} == {
        f"{place}/{name}" for name in ("libgmoe.so", "libgmoe-cuda.so", built.STAMP)
    }
    assert f"{info}/licenses/LICENSE.md" in files
    assert BytesParser().parsebytes(files[f"{info}/METADATA"]).get_all("Requires-Dist") == [
        *(f"moe-edge=={version}", "nvidia-cublas==13.*", "nvidia-cuda-runtime==13.*")
    ]
