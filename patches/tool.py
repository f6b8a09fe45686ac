#!/usr/bin/env python3
"""Build moe-edge's llama.cpp and maintain the patches. The Makefile calls this tool."""

import signal
import sys

# Ctrl-C during the imports must not print a traceback. main() handles later ones.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.version_info < (3, 10):
    sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}.")

import argparse
import os
from collections.abc import Callable
from pathlib import Path

# If this file runs as a script, sys.path starts with patches/ instead of the repository.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from patches import build, env, portable, probe, series, server
from patches.tree import sync_tree
from patches.upstream import (
    PATCHES,
    REPO,
    BuildError,
    Sdist,
    cache_dir,
    cached_sdist,
    fetch_sdist,
    is_pinned,
    locked,
    read_upstream,
    say,
    write_part,
)


def options(args: argparse.Namespace, remembered: dict[str, object]) -> build.Options:
    """Return the options for building llama.cpp.

    An option that is missing on the command line has the value of the last setup, or "auto".

    remembered: choices recorded by the last setup.
    """
    return build.Options(
        gpu=str(args.gpu or remembered.get("gpu", "auto")),
        amx=str(args.amx or remembered.get("amx", "auto")),
        cuda_arch=args.cuda_arch or None,
        sdist=args.sdist,
        jobs=args.jobs,
    )


def cmd_build(args: argparse.Namespace) -> int:
    """Print the path of llama.cpp's wheel, after building it if the cache does not have it."""
    path, _, built = build.build(read_upstream(), options(args, env.locate().read_note()))
    say("built" if built else "up to date")
    print(path)
    return 0


def cmd_setup(args: argparse.Namespace) -> int:
    """Build llama.cpp's wheel, and install it and moe-edge into the Python environment."""
    place = env.locate()
    chosen = options(args, place.read_note())
    upstream = read_upstream()
    found = None
    if args.prebuilt and chosen.gpu == chosen.amx == "auto" and not probe.choose_gpu("auto")[0]:
        stamp = env.inspect(place)["stamp"]
        if stamp is None or "sets" in stamp:
            found = portable.prebuilt(upstream, [REPO / "dist", *([args.files] * bool(args.files))])
    if found is None:
        probe.find_toolchain()  # report missing tools before creating anything
    env.ensure(place)
    if found is None:
        path, plan, built = build.build(upstream, chosen)
        key = plan.key
    else:
        (path, key), built = found, False
    extras = {name for name in args.extras.split(",") if name}
    changed = env.install(
        place, upstream, path, key, extras, {"gpu": chosen.gpu, "amx": chosen.amx}
    )
    if found is None:
        server.build_server(upstream, Path(env.inspect(place)["llama_cpp"]), chosen.sdist)
    if not built and not changed:
        say("up to date")
    print(env.ready_line(place))
    return 0


def cmd_wheel(args: argparse.Namespace) -> int:
    """Build a wheel of moe-edge or moe-edge-cuda for other machines, and print its path."""
    given = read_upstream(), args.sdist, args.jobs, args.folder
    if args.gpu:
        chosen = args.cuda_arch or portable.CUDA_ARCHITECTURES
        print(portable.build_cuda_wheel(*given, chosen))
    else:
        print(portable.build_wheel(*given))
    return 0


def cmd_server(args: argparse.Namespace) -> int:
    """Compile the server library for an installed llama_cpp package and print its path."""
    print(server.build_server(read_upstream(), args.llama_cpp.resolve(), args.sdist))
    return 0


def cmd_python(args: argparse.Namespace) -> int:
    """Print the path of the Python in the environment that moe-edge is installed into."""
    print(env.locate().python)
    return 0


def cmd_verify(args: argparse.Namespace) -> int:
    """Check the patches of llama.cpp and print the problems. Return 1 if there are any."""
    upstream = read_upstream()
    found = series.problems(PATCHES, upstream)
    path = fetch_sdist(upstream) if args.fetch else cached_sdist(upstream)
    if path is None:
        say("the source is not cached, so not everything is checked: use --fetch to download it")
    elif not is_pinned(path, upstream):
        found.append(f"{path}: not the pinned source distribution")
    elif not found:
        found += series.check_source(series.read_series(), Sdist(path, upstream))
    for problem in found:
        say(problem)
    if not found:
        patches = series.read_series()
        print(
            f"{len(patches)} patches, {sum(p.added_lines for p in patches)} added lines "
            f"in {sum(len(p.files) for p in patches)} files: no problem found"
        )
    return 1 if found else 0


def cmd_refresh(args: argparse.Namespace) -> int:
    """Rewrite the patches in their standard form.

    With --tree, the patched files are taken from an edited copy of the source.
    """
    upstream = read_upstream()
    sdist = Sdist(fetch_sdist(upstream), upstream)
    changed = series.refresh(sdist, upstream, args.tree)
    print(f"{changed} of {len(series.series_names())} patches rewritten")
    return 0


def cmd_add(args: argparse.Namespace) -> int:
    """Create a patch from files of an edited tree, or add the files to an existing patch."""
    upstream = read_upstream()
    sdist = Sdist(fetch_sdist(upstream), upstream)
    fields = {
        "From": args.author,
        "Subject": args.subject,
        "Reason": args.reason,
        "Forwarded": args.forwarded,
        "Remove-When": args.remove_when,
    }
    patch = series.add(args.patch, fields, args.changed, args.tree, sdist, upstream)
    print(f"{patch.name}: {len(patch.files)} files, {patch.added_lines} added lines")
    return 0


def cmd_source(args: argparse.Namespace) -> int:
    """Unpack llama.cpp's source in moe-edge's cache, patch it, and print the path of its folder."""
    upstream = read_upstream()
    with locked(cache_dir() / "lock"):
        root = sync_tree(fetch_sdist(upstream, args.sdist), upstream)
    print(root / upstream.source)
    return 0


def cmd_part(args: argparse.Namespace) -> int:
    """Write an archive with the source files that are needed to build llama.cpp. Print its path.

    The files are a part of the source distribution of llama-cpp-python.
    """
    upstream = read_upstream()
    target = args.folder / upstream.sdist_name
    write_part(fetch_sdist(upstream, args.sdist), upstream, target)
    print(target)
    return 0


def cmd_probe_amx(args: argparse.Namespace) -> int:
    """Test AMX instructions on this machine and print the result. Return 1 if they do not work."""
    usable, why = probe.probe_amx(probe.find_toolchain())
    print(f"AMX {'works' if usable else 'is not used'}: {why}")
    return 0 if usable else 1


def cmd_cuda_check(args: argparse.Namespace) -> int:
    """Check that our CUDA kernels compile. This needs nvcc, but no GPU.

    With --full, all CUDA sources are compiled.
    """
    upstream = read_upstream()
    chosen = build.Options(gpu="cuda", amx="off", cuda_arch=args.cuda_arch or None)
    plan = build.make_plan(upstream, chosen)
    with locked(cache_dir() / "lock") as lock:
        root = sync_tree(fetch_sdist(upstream, args.sdist), upstream)
        build.check_cuda_objects(plan, root / upstream.source, args.full, lock)
    print(f"CUDA compiles ({plan.gpu_reason}, {', '.join(plan.flags[-3:])})")
    return 0


def use_files(args: argparse.Namespace) -> None:
    """Make pip and the build use only the files in the folder --files, without network access.

    Raises BuildError if the folder does not exist.
    """
    folder: Path = args.files.resolve()
    if not folder.is_dir():
        raise BuildError(f"--files {args.files}: the folder does not exist")
    os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder.as_uri()}
    sdist = folder / read_upstream().sdist_name
    if getattr(args, "sdist", None) is None and sdist.exists():
        args.sdist = sdist


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="patches/tool.py", description=__doc__)
    top.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="take wheels and source from this folder, without network access",
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(
        name: str, function: Callable[[argparse.Namespace], int], help: str, flags: bool = False
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(function=function)
        if flags:
            sub.add_argument(
                "--gpu",
                choices=["auto", "cuda", "off"],
                help="build for NVIDIA GPUs (default: as in the last setup, otherwise auto)",
            )
            sub.add_argument(
                "--amx",
                choices=["auto", "on", "off"],
                help="use AMX instructions (default: as in the last setup, otherwise auto)",
            )
        if flags or name == "wheel":
            sub.add_argument("--jobs", type=int, help="number of compilers to run at once")
        if flags or name in ("cuda-check", "wheel"):
            sub.add_argument(
                "--cuda-arch", metavar="LIST", help="CUDA architectures, such as 86-real"
            )
        if flags or name in ("wheel", "server", "source", "part", "cuda-check"):
            sub.add_argument(
                "--sdist", type=Path, help="source distribution to use instead of downloading it"
            )
        return sub

    command("build", cmd_build, "build the wheel unless it is cached, and print its path", True)
    setup = command("setup", cmd_setup, "build the wheel and install it and moe-edge", True)
    setup.add_argument(
        "--extras", default="", help="comma-separated extras to install, such as dev,convert"
    )
    setup.add_argument(
        "--prebuilt",
        action="store_true",
        help="if possible, use the libraries of a moe-edge wheel in dist/ or --files",
    )
    wheels = command("wheel", cmd_wheel, "build a wheel for other machines, and print its path")
    wheels.add_argument(
        "--folder", type=Path, default=REPO / "dist", help="folder for the wheel (default: dist)"
    )
    wheels.add_argument(
        "--gpu", choices=["cuda"], help="build moe-edge-cuda, the additional wheel for NVIDIA GPUs"
    )
    servers = command("server", cmd_server, "compile the server library and print its path")
    servers.add_argument("llama_cpp", type=Path, help="folder of the installed llama_cpp package")
    command("python", cmd_python, "print the path of the environment's Python")
    verify = command("verify", cmd_verify, "check the patch series")
    verify.add_argument(
        "--fetch", action="store_true", help="download the source if it is not cached"
    )
    refresh = command("refresh", cmd_refresh, "rewrite the patches in their standard form")
    refresh.add_argument(
        "--tree", type=Path, help="edited copy of llama.cpp from which to take the changes"
    )
    add = command("add", cmd_add, "create a patch from files of an edited tree")
    add.add_argument("patch", help="file name of the patch, such as route-hook.patch")
    add.add_argument(
        "--files", dest="changed", nargs="+", default=[], help="paths inside llama.cpp"
    )
    add.add_argument("--tree", type=Path, required=True, help="edited copy of llama.cpp")
    add.add_argument("--author", help="author of the patch, as NAME <MAIL>")
    for name in ("subject", "reason", "forwarded", "remove-when"):
        add.add_argument(f"--{name}", help=f"the field {name.title()} of the patch's header")
    command("source", cmd_source, "unpack and patch the source, and print the llama.cpp folder")
    part = command(
        "part", cmd_part, "write the part of the source that a build without network needs"
    )
    part.add_argument("folder", type=Path, help="folder for the archive")
    command("probe-amx", cmd_probe_amx, "test in a child process whether AMX works")
    cuda_check = command("cuda-check", cmd_cuda_check, "compile some CUDA objects")
    cuda_check.add_argument(
        "--full", action="store_true", help="compile all CUDA objects (an hour or more)"
    )
    return top


def main() -> int:
    """Run the command that the command line names, and return the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = parser().parse_args()
    try:
        if args.files is not None:
            use_files(args)
        code: int = args.function(args)
    except BuildError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted: the next call continues from here")
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
