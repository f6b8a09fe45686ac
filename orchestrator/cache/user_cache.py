"""What lies in the user cache, and deleting it.

Everything there is made again when it is needed, for the time and the network that this takes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cache.files import user_folder
from orchestrator.errors import ConfigError

ALL = "all"
KINDS = {
    "bench": "models that `moe-edge bench` made, made again when it runs",
    "build": "objects of the last builds, so that `make build` compiles what changed alone",
    "cuda": "libraries for builds with CUDA",
    "emulation": "objects of the tests that emulate a GPU",
    "hotness": "which experts earlier chats used, of each model",
    "plans": "which plan `--max-loss` took, of each model, so that it stays",
    "sdist": "the source of llama.cpp as it was downloaded",
    "servers": "llama.cpp's server, as `moe-edge serve` compiled it",
    "speed": "how fast this machine computes and reads, measured again when it is needed",
    "source": "the source of llama.cpp with our patches",
    "tuned": "what policies tuned, of each model",
    "usage": "how often earlier chats and servers used each expert, of each model",
    "wheels": "llama.cpp as it was built, for other environments",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder of the cache. nbytes: what its files take on the disk."""

    name: str
    path: Path
    n_files: int
    nbytes: int

    @property
    def about(self) -> str:
        return KINDS.get(self.name, "")


def entries() -> list[Entry]:
    """The folders of the cache, the largest first."""
    folder = user_folder("cache")
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            sizes = [512 * each.lstat().st_blocks for each in path.rglob("*") if not each.is_dir()]
            found.append(Entry(path.name, path, len(sizes), sum(sizes)))
    return sorted(found, key=lambda each: (-each.nbytes, each.name))


def clear(names: tuple[str, ...]) -> list[Entry]:
    """Deletes the folders of these names, or all of them, and returns what they were. Raises
    ConfigError for a name that is not there, before anything is deleted, and OSError."""
    here = {each.name: each for each in entries()}
    chosen = list(here.values()) if ALL in names else []
    for name in names if ALL not in names else ():
        if name in here:
            chosen.append(here[name])
        elif name not in KINDS:
            known = ", ".join(here) or "nothing"
            raise ConfigError(f"--clear {name}: the cache holds {known}; {ALL} clears everything")
    for each in chosen:
        shutil.rmtree(each.path)
    return chosen
