"""Errors that the emulated GPU must detect. Each is made on purpose."""

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import HERE
from .emulation.build import ALIGNED, find_compiler

# Message of each error before the process ends. "": the program itself checks the later effect.
SAID = {
    "host-reads-device": "the host touched",
    "kernel-gets-pageable": "neither the device's memory nor pinned",
    "kernel-gets-other-device": "which is memory of another device",
    "copy-leaves-allocation": "leaves its allocation",
    "copy-from-two-pieces": "leaves its allocation",
    "misaligned-load": "an access that is not aligned",
    "write-past-the-end": "something wrote past an allocation",
    "kernel-in-other-stream": "into a stream of another device",
    "event-in-other-stream": "an event is recorded in a stream of another device",
    "new-thread-asks": "another current device queries an event",
    "late-pageable-copy": "",
    "not-ready-stays": "",
    "sticky-error": "",
    "blocks-in-order": "",
    "blocks-one-at-a-time": "",
    "atomic-in-two": "",
    "shared-memory-unset": "",
    "too-much-shared-memory": "more static shared memory than a GPU has",
    "captured-stream-waited-for": "a captured stream is synchronized",
    "captured-stream-asked": "a captured stream is queried",
    "captured-device-waited-for": "the device is synchronized while one of its streams is captured",
    "captured-event-asked": "an event of a capture is queried",
    "captured-event-waited-for": "an event of a capture is synchronized",
    "capture-waits-for-outside": "a wait crosses the border of a capture",
    "captured-pageable-copy": "a copy from or to pageable memory is captured",
    "captured-copy-back": "a copy from or to pageable memory is captured",
    "allocation-while-captured": "memory is allocated while a stream is captured",
    "free-while-captured": "memory is freed while a stream is captured",
    "pinning-while-captured": "host memory is pinned while a stream is captured",
    "blocking-copy-while-captured": "a blocking copy while a stream is captured",
    "default-stream-while-captured": "work goes to the default stream",
    "default-stream-captured": "the default stream is captured",
    "captured-twice": "a stream that is captured already",
    "capture-that-nobody-began": "a capture ends that was not begun",
    "captured-stream-destroyed": "a stream is destroyed while it is captured",
    "blocks-share-nothing": "",
    "relaxed-capture-allows": "",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the emulated GPU needs g++")
    target = tmp_path_factory.mktemp("strictness") / "strictness_test"
    sources = HERE / "strictness_test.cpp", HERE / "emulation/emulation.cpp"
    command = [compiler.path, "-std=c++17", "-O1", "-w", "-pthread", *ALIGNED]
    command += [f"-I{HERE / 'emulation'}", *map(str, sources), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def has_protection_keys():
    return " ospke" in Path("/proc/cpuinfo").read_text()


def test_every_error_is_listed(program):
    done = subprocess.run([program, "list"], check=True, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == sorted(SAID)


@pytest.mark.parametrize("act", SAID)
def test_the_error_is_detected(program, act):
    if act == "host-reads-device" and not has_protection_keys():
        pytest.skip("this processor has no protection keys")
    environment = os.environ | {"MOE_EMU_DEVICES": "2"}
    environment |= {"MOE_EMU_FAIL": "1"} if act == "sticky-error" else {}
    done = subprocess.run(
        [program, act], capture_output=True, text=True, env=environment, timeout=300
    )
    if SAID[act]:
        assert done.returncode < 0 and SAID[act] in done.stderr, (done.returncode, done.stderr)
    else:
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
