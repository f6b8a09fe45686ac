"""Check every block of every tensor with ggml's validation, and the checksums in the same pass."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from gguf_tools.file.chunks import CHUNK_BYTES
from gguf_tools.file.layout import BLOCK, parse_expert_name
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile
from gguf_tools.progress import Progress, ProgressMeter
from gguf_tools.quantize.ggml import Ggml, native_stderr_hidden
from gguf_tools.verify.checksums import FileChecksums
from gguf_tools.verify.report import Problem, VerifyReport, problem_at
from gguf_tools.workers import Job, run_all

# Maximum number of invalid blocks to count in one tensor. They are reported as one problem.
MAX_COUNTED = 1000


def check_blocks(
    parts: Sequence[GGUFFile],
    report: VerifyReport,
    ggml: Ggml,
    threads: int,
    progress: Progress | None,
) -> None:
    """Check that all tensor data of a model is finite and that its checksums are right.

    Adds the problems and the numbers of checked tensors, blocks and bytes to the report.

    parts: the files of the model.
    progress: called with the finished share, 0 to 1.
    """
    tensors = [(part, info) for part in parts for info in part.tensors.values()]
    report.n_tensors = len(tensors)
    bad: dict[tuple[Path, str], list[int]] = {}
    unknown = {kind for kind in {info.type for _, info in tensors} if not ggml.can_check(kind)}
    checked = [info for _, info in tensors if info.type not in unknown]
    report.nbytes = sum(info.nbytes for info in checked)
    sums = {part.path: FileChecksums(part) for part in parts}
    report.unchecked = [path for path, each in sums.items() if not each.is_covered]
    report.n_blocks = sum(info.nbytes // BLOCK[info.type].bytes for info in checked)

    total = sum(info.nbytes for _, info in tensors)
    total += sum(part.size for part in parts if sums[part.path].hub_hash is not None)

    def jobs() -> Iterator[Job]:
        for each in sums.values():
            yield from each.jobs()
        for part, info in tensors:
            block_bytes = BLOCK[info.type].bytes
            step = max(1, CHUNK_BYTES // block_bytes) * block_bytes
            found = bad.setdefault((part.path, info.name), [])
            for start in range(0, info.nbytes, step):
                size = min(step, info.nbytes - start)
                known = None if info.type in unknown else ggml
                yield partial(_check_run, known, sums[part.path], info, (start, size), found)

    with native_stderr_hidden():
        run_all(jobs(), threads, ProgressMeter(progress, total))
    for part, info in tensors:
        found = sorted(bad.get((part.path, info.name), ()))
        if info.type in unknown:
            report.problems.append(
                problem_at(part, info, f"ggml cannot validate type {info.type.tier_name}")
            )
        elif found:
            report.problems.append(_block_problem(part, info, found))
    for each in sums.values():
        report.problems += each.problems()


def _check_run(
    ggml: Ggml | None,
    sums: FileChecksums,
    info: TensorInfo,
    run: tuple[int, int],
    found: list[int],
) -> int:
    """Check a piece of a tensor's data, and return its number of bytes.

    Adds the data to the checksums, and the number of each invalid quantization block to `found`.

    ggml: the library, or None if it cannot validate the type. Then only the checksums are computed.
    run: start and length of the piece, in bytes from the start of the tensor.
    """
    start, nbytes = run
    part = sums.part
    sums.add(info, start, part.bytes_at(info.offset + start, nbytes))
    if ggml is None:
        return nbytes
    block_bytes = BLOCK[info.type].bytes
    todo = [(start // block_bytes, nbytes // block_bytes)]
    bad: list[int] = []
    while todo and len(bad) < MAX_COUNTED:
        block, count = todo.pop()
        data = part.bytes_at(info.offset + block * block_bytes, count * block_bytes)
        if ggml.is_valid(info.type, data):
            continue
        if count == 1:
            bad.append(block)
        else:
            half = count // 2
            todo += [(block + half, count - half), (block, half)]
    found += bad
    return nbytes


def _block_problem(part: GGUFFile, info: TensorInfo, found: list[int]) -> Problem:
    """Return a problem that names the first invalid block of a tensor and how many follow.

    found: the numbers of the invalid blocks, sorted.
    """
    block = found[0]
    size = BLOCK[info.type]
    offset = info.offset + block * size.bytes
    expert = ""
    if parse_expert_name(info.name) is not None and len(info.shape) == 3:
        per_expert = info.shape[0] * info.shape[1] // size.weights
        expert = f" (expert {block // per_expert})" if per_expert else ""
    what = "value" if size.weights == 1 else f"{info.type.tier_name} block"
    rest = ""
    if len(found) > 1:
        n_more = f"{'at least ' * (len(found) >= MAX_COUNTED)}{len(found) - 1}"
        rest = f", and {n_more} more"
    return Problem(
        f"{part.path}: tensor {info.name}: {what} {block}{expert} at offset {offset} is not"
        f" finite{rest}",
        str(part.path),
        info.name,
        offset,
        block,
    )
