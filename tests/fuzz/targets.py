"""Targets: readers of external files, each with damaged input.

A target returns "accepted" or the name of the error. Any exception but a MoeEdgeError that names
its file is a finding.
"""

import io
import json
import shutil
import struct
import sys
import zipfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2]))
for _folder in ("helpers", "unit/gguf", "unit/replay"):
    sys.path.insert(0, str(HERE.parents[1] / _folder))

import damage
from sound import Bench as Bench

from gguf_tools import inspect
from gguf_tools.convert.checkpoint import open_checkpoint
from gguf_tools.convert.pretokenizer import pre_tokenizer
from gguf_tools.errors import MoeEdgeError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, expert_tensor_name
from gguf_tools.pack import export, pack
from gguf_tools.quantize.ggml import load_ggml
from gguf_tools.quantize.imatrix import ExpertImportance, read_imatrix
from gguf_tools.verify import verify
from orchestrator.cache import profile
from orchestrator.config import Config
from orchestrator.cost import losses
from orchestrator.lab.replay.file import read_trace
from orchestrator.lab.replay.trace import FORMAT
from orchestrator.plan.planning import plan_memory, scratch_bytes
from orchestrator.plan.records import Machine, PlanRequest

ACCEPTED = "accepted"


def _written(bench, data, name="fuzz.gguf"):
    path = bench.folder / name
    path.write_bytes(data)
    return path


def _answer(paths, work):
    """Run work. An error must name one of the files."""
    try:
        work()
    except MoeEdgeError as error:
        assert any(str(path) in str(error) for path in paths), f"no file in: {error!r}"
        return type(error).__name__
    return ACCEPTED


def _described(files, paths):
    """Describe a model of one or two files that is made of paths.

    `verify` must report at least the problems that prevent opening it.
    """

    def work():
        with ExpertModel.open(*files) as model:
            inspect.describe(model)

    report = verify(*files, threads=1, ggml=_ggml())
    assert all(problem.file in map(str, paths) for problem in report.problems)
    answer = _answer(paths, work)
    assert answer == ACCEPTED or report.problems, f"verify does not see the {answer}"
    return answer


def header(bench, random):
    """Open a model, and describe it without running it."""
    path = _written(bench, damage.damaged(random.choice(bench.models), random))

    def work():
        with ExpertModel.open(path) as model:
            assert inspect.render(inspect.describe(model))
            profile.identity(model)

    return _answer([path], work)


def plan(bench, random):
    """Plan a model's memory. A refusal here concerns the options, not the file."""
    path = _written(bench, damage.damaged(random.choice(bench.models), random))
    try:
        with ExpertModel.open(path) as model:
            policy = random.choice((None, "plain", "lru", "dymoe", "dynaexq"))
            options = {"expert_ram": random.choice((None, 1 << 14, 1 << 20)), "policy": policy}
            if policy == "plain":
                del options["expert_ram"]
            config = Config.build(model=path, **options)
            scratch_bytes(model, config)
            made = plan_memory(PlanRequest(config), model, Machine(1 << 34))
            assert made.total_bytes >= 0
    except MoeEdgeError as error:
        assert str(error)
        return type(error).__name__
    return ACCEPTED


def checked(bench, random):
    """`verify` never raises: each problem is a finding that names the file."""
    path = _written(bench, damage.damaged(random.choice(bench.models), random))
    report = verify(path, threads=1, ggml=_ggml())
    assert all(str(path) in problem.text for problem in report.problems)
    json.dumps(report.as_dict())
    if not report.problems:  # a file that verify accepts can be opened
        ExpertModel.open(path).close()
    return "problems" if report.problems else ACCEPTED


def pair(bench, random):
    """A high and a low file, one of which is damaged."""
    which = random.randrange(2)
    files = [bench.high, bench.low]
    files[which] = _written(bench, damage.damaged(bench.pair_models[which], random))
    return _described(files, files)


def parts(bench, random):
    """A model in three files, one of which is damaged."""
    which = random.randrange(3)
    folder = bench.folder / "damaged"
    folder.mkdir(exist_ok=True)
    paths = [folder / path.name for path in bench.parts]
    for path, model in zip(paths, bench.part_models, strict=True):
        path.write_bytes(model.encoded())
    paths[which].write_bytes(damage.damaged(bench.part_models[which], random))
    if random.randrange(20) == 19:
        paths[random.randrange(3)].unlink()
    return _described(paths[:1], paths)


def written(bench, random):
    """`pack` and `export` of every file that can be opened: the copy is as good as its source."""
    path = _written(bench, damage.damaged(random.choice(bench.models), random))
    out = bench.folder / "out.gguf"
    out.unlink(missing_ok=True)

    def work():
        if random.randrange(2):
            export(path, out)
        else:
            pack(path, out, random.choice((["q8_0"], ["q8_0", "q4_0"])), threads=1, ggml=_ggml())

    answer = _answer([path, out], work)
    assert out.exists() == (answer == ACCEPTED)
    assert not list(bench.folder.glob(".out.gguf*"))
    if out.exists():
        problems = verify(out, threads=1, ggml=_ggml()).problems
        # NaN values and data that ggml cannot validate are copied
        structural = [
            each.text
            for each in problems
            if each.block is None and "ggml cannot validate type" not in each.text
        ]
        assert not structural, structural
    return answer


def importance(bench, random):
    """An importance matrix in either format."""
    if random.randrange(2):
        data = damage.damaged(bench.imatrix, random)
    else:
        data = _older_imatrix(bench.opened, random)
    path = _written(bench, data, "fuzz.dat")

    def work():
        weights = ExpertImportance(read_imatrix(path), bench.opened)
        assert np.isfinite(weights.of(0, DOWN, 0)).all() and isinstance(weights.note(), str | None)

    return _answer([path, bench.opened.path], work)


def _older_imatrix(model, random):
    """Return an importance matrix in the format before GGUF, with some numbers changed."""

    def odd(value):
        if random.randrange(24) == 23:
            value = damage.any_number(random)
        return struct.pack("<I", value & 0xFFFFFFFF)

    names = [expert_tensor_name(il, kind) for il in model.layer_ids for kind in model.kinds(0)]
    parts = [odd(len(names))]
    for name in names:
        values = np.ones(32 * model.n_expert, np.float32)
        if random.randrange(24) == 23:
            values[random.randrange(values.size)] = random.choice((-1, np.nan, np.inf, 1e38))
        parts += (odd(len(name)), name.encode(), odd(3), odd(values.size), values.tobytes())
    data = b"".join((*parts, odd(2), odd(4), b"text"))
    return data[: random.randrange(len(data) + 1)] if random.randrange(12) == 11 else data


def checkpoint(bench, random):
    """A checkpoint folder with one damaged file."""
    folder = bench.folder / "damaged-checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bench.checkpoint, folder)
    path = random.choice(sorted(folder.iterdir()))
    if path.suffix == ".json":
        good = json.loads(path.read_text())
        path.write_text(damage.damaged_json(good, random), encoding="utf-8")
    else:
        head = damage.damaged_json(bench.weights, random).encode()
        length = len(head) if random.randrange(8) else damage.any_number(random)
        path.write_bytes(damage.number(length) + head + bytes(random.choice((192, 191, 0))))

    def work():
        assert open_checkpoint(folder).nbytes >= 0
        pre_tokenizer(folder)

    return _answer([folder], work)


def _damaged_json(bench, good, random):
    path = bench.folder / "fuzz.json"
    path.write_text(damage.damaged_json(good, random), encoding="utf-8")
    return path


def losses_of_experts(bench, random):
    """A loss table."""
    path = _damaged_json(bench, bench.losses, random)

    def work():
        table = losses.load(path, bench.opened)
        assert np.isfinite(table.filled()).all() and table.render()

    return _answer([path], work)


def hotness(bench, random):
    """A profile of expert use."""
    path = _damaged_json(bench, bench.profile, random)

    def work():
        found = profile.load(path, bench.opened)
        assert found.shape == (2, 2) and np.isfinite(found).all()

    return _answer([path], work)


def trace(bench, random):
    """A recorded run with damaged arrays, a damaged header, or changed bytes."""
    what = random.randrange(3)
    if what == 0:
        data = bytearray(bench.trace_bytes)
        for _ in range(random.randrange(1, 6)):
            data[random.randrange(len(data))] = random.getrandbits(8)
        path = _written(bench, bytes(data), "fuzz.npz")
    else:
        arrays = {name: array.copy() for name, array in bench.trace.arrays.items()}
        head = json.dumps({"format": FORMAT, **asdict(bench.trace.header)})
        if what == 1:
            head = damage.damaged_json(json.loads(head), random)
        else:
            _damage_array(arrays, random)
        raw = np.frombuffer(head.encode(), np.uint8)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in {"header": raw, **arrays}.items():
                archive.writestr(f"{name}.npy", _npy(array, random))
        path = _written(bench, buffer.getvalue(), "fuzz.npz")

    def work():
        for step in read_trace(path).steps():
            assert step.events

    return _answer([path], work)


def _damage_array(arrays, random):
    name = random.choice(list(arrays))
    array = arrays[name]
    what = random.randrange(4)
    if what == 0 and array.size:
        info = np.iinfo(array.dtype) if array.dtype.kind in "iu" else np.finfo(array.dtype)
        array.flat[random.randrange(array.size)] = random.choice((info.min, info.max, 0, 1))
    elif what == 1:
        arrays[name] = array[: random.randrange(len(array) + 1)]
    elif what == 2:
        arrays[name] = array.astype(random.choice((np.int64, np.float64, np.uint8, bool, "U3")))
    else:
        del arrays[name]


def _npy(array, random):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    data = buffer.getvalue()
    if random.randrange(40) == 39:  # a wrong shape
        shape = str(array.shape).encode()
        huge = str((random.choice(damage.NUMBERS),) * array.ndim).encode()
        data = data.replace(shape, huge, 1)
    return data


@cache
def _ggml():
    return load_ggml()


WITH_GGML = (checked, pair, parts, written)
TARGETS = {
    each.__name__: each
    for each in (
        *(header, plan, *WITH_GGML),
        *(importance, checkpoint, losses_of_experts, hotness, trace),
    )
}
