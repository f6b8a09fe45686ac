#!/usr/bin/env python3
"""Builds moe-edge's llama.cpp and keeps the patches in order; the Makefile calls it."""

import signal
import sys

# A Ctrl-C while modules are imported gives no traceback. main() has a sentence for later ones.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.version_info < (3, 10):
    sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}.")

import argparse
import os
from collections.abc import Callable
from pathlib import Path

# Where this runs as a file, sys.path starts in patches/ instead of the repository.
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
    """The flags of the command line, else those of the last set-up, else automatic ones."""
    return build.Options(
        gpu=str(args.gpu or remembered.get("gpu", "auto")),
        amx=str(args.amx or remembered.get("amx", "auto")),
        cuda_arch=args.cuda_arch or None,
        sdist=args.sdist,
        jobs=args.jobs,
    )


def cmd_build(args: argparse.Namespace) -> int:
    path, _, built = build.build(read_upstream(), options(args, env.locate().read_note()))
    say("built" if built else "up to date")
    print(path)
    return 0


def cmd_setup(args: argparse.Namespace) -> int:
    place = env.locate()
    chosen = options(args, place.read_note())
    upstream = read_upstream()
    found = None
    if args.prebuilt and chosen.gpu == chosen.amx == "auto" and not probe.choose_gpu("auto")[0]:
        stamp = env.inspect(place)["stamp"]
        if stamp is None or "sets" in stamp:
            found = portable.prebuilt(upstream, [REPO / "dist", *([args.files] * bool(args.files))])
    if found is None:
        probe.find_toolchain()  # what is missing is said before anything is created
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
    given = read_upstream(), args.sdist, args.jobs, args.folder
    if args.gpu:
        chosen = args.cuda_arch or portable.CUDA_ARCHITECTURES
        print(portable.build_cuda_wheel(*given, chosen))
    else:
        print(portable.build_wheel(*given))
    return 0


def cmd_server(args: argparse.Namespace) -> int:
    print(server.build_server(read_upstream(), args.llama_cpp.resolve(), args.sdist))
    return 0


def cmd_python(args: argparse.Namespace) -> int:
    print(env.locate().python)
    return 0


def cmd_verify(args: argparse.Namespace) -> int:
    upstream = read_upstream()
    found = series.problems(PATCHES, upstream)
    path = fetch_sdist(upstream) if args.fetch else cached_sdist(upstream)
    if path is None:
        say("source not cached: applying and refreshing are not checked (--fetch downloads it)")
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
            f"in {sum(len(p.files) for p in patches)} files: fine"
        )
    return 1 if found else 0


def cmd_refresh(args: argparse.Namespace) -> int:
    upstream = read_upstream()
    sdist = Sdist(fetch_sdist(upstream), upstream)
    changed = series.refresh(sdist, upstream, args.tree)
    print(f"{changed} of {len(series.series_names())} patches rewritten")
    return 0


def cmd_add(args: argparse.Namespace) -> int:
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
    upstream = read_upstream()
    with locked(cache_dir() / "lock"):
        root = sync_tree(fetch_sdist(upstream, args.sdist), upstream)
    print(root / upstream.source)
    return 0


def cmd_part(args: argparse.Namespace) -> int:
    upstream = read_upstream()
    target = args.folder / upstream.sdist_name
    write_part(fetch_sdist(upstream, args.sdist), upstream, target)
    print(target)
    return 0


def cmd_probe_amx(args: argparse.Namespace) -> int:
    usable, why = probe.probe_amx(probe.find_toolchain())
    print(f"AMX {'works' if usable else 'is not used'}: {why}")
    return 0 if usable else 1


def cmd_cuda_check(args: argparse.Namespace) -> int:
    """Configures with CUDA and compiles some of its objects: no GPU needed."""
    upstream = read_upstream()
    chosen = build.Options(gpu="cuda", amx="off", cuda_arch=args.cuda_arch or None)
    plan = build.make_plan(upstream, chosen)
    with locked(cache_dir() / "lock") as lock:
        root = sync_tree(fetch_sdist(upstream, args.sdist), upstream)
        build.check_cuda_objects(plan, root / upstream.source, args.full, lock)
    print(f"CUDA compiles ({plan.gpu_reason}, {', '.join(plan.flags[-3:])})")
    return 0


def use_files(args: argparse.Namespace) -> None:
    """--files: pip takes wheels from this folder alone, and the source distribution is there too.
    Raises BuildError where the folder is not there."""
    folder: Path = args.files.resolve()
    if not folder.is_dir():
        raise BuildError(f"--files {args.files}: there is no such folder")
    os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder.as_uri()}
    sdist = folder / read_upstream().sdist_name
    if getattr(args, "sdist", None) is None and sdist.exists():
        args.sdist = sdist


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="patches/tool.py", description=__doc__)
    top.add_argument(
        "--files", type=Path, metavar="DIR", help="wheels and source from there, no network"
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(
        name: str, function: Callable[[argparse.Namespace], int], help: str, flags: bool = False
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(function=function)
        if flags:
            sub.add_argument("--gpu", choices=["auto", "cuda", "off"])
            sub.add_argument("--amx", choices=["auto", "on", "off"])
            sub.add_argument("--jobs", type=int)
        if flags or name in ("cuda-check", "wheel"):
            sub.add_argument("--cuda-arch", metavar="LIST", help="e.g. 86-real")
        if flags or name in ("wheel", "server", "source", "part", "cuda-check"):
            sub.add_argument("--sdist", type=Path, help="use this copy instead of a download")
        return sub

    command("build", cmd_build, "build the wheel, or find it in the cache; prints its path", True)
    setup = command("setup", cmd_setup, "build, then install into the environment", True)
    setup.add_argument("--extras", default="", help="comma-separated, e.g. dev,convert")
    setup.add_argument(
        "--prebuilt", action="store_true", help="with libraries of a wheel in dist/ or --files"
    )
    anywhere = command("wheel", cmd_wheel, "build the wheel that runs anywhere; prints its path")
    anywhere.add_argument("--folder", type=Path, default=REPO / "dist")
    anywhere.add_argument("--jobs", type=int)
    anywhere.add_argument("--gpu", choices=["cuda"], help="what it has besides on NVIDIA GPUs")
    beside = command("server", cmd_server, "compile the server library; prints its path")
    beside.add_argument("llama_cpp", type=Path, help="the installed llama_cpp package")
    command("python", cmd_python, "print the environment's Python")
    verify = command("verify", cmd_verify, "check the series")
    verify.add_argument("--fetch", action="store_true", help="download the source when missing")
    refresh = command("refresh", cmd_refresh, "rewrite the patches")
    refresh.add_argument("--tree", type=Path, help="edited copy of llama.cpp to take them from")
    add = command("add", cmd_add, "create a patch from files of an edited tree")
    add.add_argument("patch", help="e.g. route-hook.patch")
    add.add_argument(
        "--files", dest="changed", nargs="+", default=[], help="paths inside llama.cpp"
    )
    add.add_argument("--tree", type=Path, required=True)
    add.add_argument("--author", help="NAME <MAIL>")
    for name in ("subject", "reason", "forwarded", "remove-when"):
        add.add_argument(f"--{name}")
    command("source", cmd_source, "unpack and patch; prints the llama.cpp folder")
    part = command("part", cmd_part, "write the part of the source that is built; prints its path")
    part.add_argument("folder", type=Path)
    command("probe-amx", cmd_probe_amx, "try AMX in a child process")
    cuda_check = command("cuda-check", cmd_cuda_check, "compile some CUDA objects")
    cuda_check.add_argument("--full", action="store_true", help="all of them (an hour and more)")
    return top


def main() -> int:
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
        say("interrupted; the next call goes on from here")
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
