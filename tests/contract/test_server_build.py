"""The server's library: one for each wheel and each source, and only beside a wheel of ours."""

import json
import shutil
from dataclasses import replace

import pytest

from patches import build, server
from patches.upstream import BuildError, read_upstream


def package_with(folder, key):
    folder.mkdir(exist_ok=True)
    (folder / "moe_edge_build.json").write_text(json.dumps({"key": key}))
    return folder


def test_the_path_follows_what_is_compiled(tmp_path, monkeypatch):
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


def test_two_checkouts_of_one_environment_compile_in_folders_of_their_own(tmp_path, monkeypatch):
    """cmake refuses a folder that was configured for another checkout."""
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
    with pytest.raises(BuildError, match="is not moe-edge's llama"):
        server.build_server(read_upstream(), tmp_path)


def test_a_library_in_the_cache_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = package_with(tmp_path / "llama_cpp", "a")
    path = server.library_path(read_upstream(), package, tmp_path / "moe-edge")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    monkeypatch.setattr(server.probe, "find_toolchain", lambda: pytest.fail("it looks for one"))
    assert server.build_server(read_upstream(), package) == path
