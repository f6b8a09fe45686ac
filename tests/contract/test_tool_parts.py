"""Parts of the build tool: the server's library, nvcc's architectures, and pip without a build."""

import json
import shutil
from dataclasses import replace

import pytest

from patches import backend, build, cuda, server
from patches.upstream import REPO, BuildError, read_upstream


def package_with(folder, key):
    folder.mkdir(exist_ok=True)
    (folder / "moe_edge_build.json").write_text(json.dumps({"key": key}))
    return folder


def test_the_librarys_path_depends_on_its_sources(tmp_path, monkeypatch):
    upstream = read_upstream()
    package = package_with(tmp_path / "llama_cpp", "a")
    first = server.library_path(upstream, package, tmp_path)
    assert first.parents[2] == tmp_path
    others = [server.library_path(replace(upstream, sha256="0" * 64), package, tmp_path)]
    others.append(server.library_path(upstream, package_with(package, "b"), tmp_path))
    package_with(package, "a")
    sources = tmp_path / "sources"
    shutil.copytree(server.SOURCES, sources)
    monkeypatch.setattr(server, "SOURCES", sources)
    assert server.library_path(upstream, package, tmp_path) == first
    with (sources / "CMakeLists.txt").open("a") as file:
        file.write("\n")
    others.append(server.library_path(upstream, package, tmp_path))
    assert len({first, *others}) == 4


def test_two_checkouts_of_one_environment_use_separate_folders(tmp_path, monkeypatch):
    """cmake refuses a build folder that was configured for another checkout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = package_with(tmp_path / "llama_cpp", "a")
    compiled = []

    def compile_tree(plan, source, *_):
        compiled.append((plan.build_dir, source))
        raise BuildError("stopped")

    monkeypatch.setattr(build, "compile_tree", compile_tree)
    monkeypatch.setattr(server, "fetch_sdist", lambda *_: tmp_path)
    monkeypatch.setattr(server, "sync_tree", lambda *_: tmp_path)
    other = tmp_path / "other"
    shutil.copytree(server.SOURCES, other)
    for sources in (server.SOURCES, other):
        monkeypatch.setattr(server, "SOURCES", sources)
        with pytest.raises(BuildError, match="stopped"):
            server.build_server(read_upstream(), package)
    (one, _), (another, source) = compiled
    assert source == other and one != another


def test_a_stock_package_has_no_server(tmp_path):
    with pytest.raises(BuildError, match="was not built by moe-edge"):
        server.build_server(read_upstream(), tmp_path)


def test_a_library_in_the_cache_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = package_with(tmp_path / "llama_cpp", "a")
    path = server.library_path(read_upstream(), package, tmp_path / "moe-edge")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"compiled")
    (package / "lib").mkdir()
    monkeypatch.setattr(server.probe, "find_toolchain", lambda: pytest.fail("it searches"))
    for _ in range(2):
        installed = server.build_server(read_upstream(), package)
        assert installed.parent == package / "lib" and installed.read_bytes() == b"compiled"
        assert [*installed.parent.iterdir()] == [installed]


def compiler(folder, command):
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nvcc(tmp_path):
    """A compiler for compute capabilities up to 9.0."""
    return compiler(tmp_path, "printf 'compute_75\\ncompute_80\\ncompute_86\\ncompute_90\\n'")


def test_code_for_the_gpus_that_nvcc_supports(nvcc, capsys):
    """Machine code (`-real`) for supported GPUs, else PTX (`-virtual`) of a lower capability."""
    assert cuda.architectures(nvcc, [75, 86]) == "75-real;86-real"
    assert cuda.architectures(nvcc, []) == "80-virtual"
    assert not capsys.readouterr().err
    # newer than the toolkit, and between two supported ones
    assert cuda.architectures(nvcc, [120]) == "90-virtual"
    assert "does not support the GPU's compute capability 12.0" in capsys.readouterr().err
    assert cuda.architectures(nvcc, [89, 89]) == "86-virtual"
    with pytest.raises(BuildError, match=r"6\.1, but this CUDA toolkit only supports 7\.5"):
        cuda.architectures(nvcc, [61])


def test_a_compiler_without_architectures_is_reported(tmp_path):
    with pytest.raises(BuildError, match="--list-gpu-arch lists no architecture"):
        cuda.offered_architectures(compiler(tmp_path, "exit 1"))


HOOKS = ("get_requires_for_build_wheel", "get_requires_for_build_editable")


@pytest.mark.parametrize("hook", HOOKS)
def test_pip_without_our_build_gets_one_sentence(hook, tmp_path, monkeypatch):
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda _name: str(tmp_path))
    version = read_upstream().version
    stock = tmp_path / f"llama_cpp_python-{version}.dist-info" / "METADATA"
    for is_there in (False, True):
        if is_there:
            stock.parent.mkdir()
            stock.write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n")
        with pytest.raises(SystemExit, match=r"^moe-edge needs .* `make build` .*\.$"):
            getattr(backend, hook)()


def test_pip_finds_the_installed_build():
    text = (REPO / "pyproject.toml").read_text()
    assert 'build-backend = "patches.backend"' in text and 'backend-path = ["."]' in text
    # With a static list, uv would resolve it without asking the backend.
    assert 'dynamic = ["dependencies"]' in text and "\ndependencies = [" not in text
    version = read_upstream().local_version
    if version not in {each.version for each in backend.distributions(name="llama_cpp_python")}:
        pytest.skip("our llama.cpp is not installed: run `make build`")
    backend.need_our_build()
