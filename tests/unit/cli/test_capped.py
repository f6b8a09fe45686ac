"""Commands in a memory cgroup of the size of their --ram. tests/helpers/capped.py measures all
commands."""

import json

import capped
import pytest
from command_line import python
from served import library_path

RAM = 112 << 20


@pytest.fixture(scope="module")
def known(library, tiny_model, tmp_path_factory):
    try:
        capped.Group.make(RAM).close()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    folder = tmp_path_factory.mktemp("capped")
    (folder / "text.txt").write_text("Some words of a text that says the same again. " * 100)
    return capped.commands(
        tiny_model("qwen3moe", "q8_0", "q4_k"), folder / "text.txt", folder, tokens=512
    )


@pytest.mark.parametrize("name", ["chat", "chat, --max-loss", "eval --kl", "calibrate", "doctor"])
def test_a_command_stays_within_its_memory_limit(known, name, tmp_path, monkeypatch):
    """The cache is empty, so `calibrate` also times the processor within the limit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = known[name].run(RAM, "--threads=1")
    assert found.status == 0, found.err
    assert 0 < found.peak_bytes <= RAM


def test_a_chat_stays_within_the_smallest_ram_that_it_names(known):
    """With the smallest --ram, all memory is planned, including pages of libraries, so a plan that
    is too small would fail. The prompt needs the scratch of a whole micro-batch."""
    line = capped.Line([*known["chat, dynaexq"].args, "--json", "--threads=1"])
    found, ram = line.run_least()
    assert found.status == 0, found.err
    peak = json.loads(found.out)["stats"]["peak_rss_bytes"]
    assert 0.8 * ram < peak <= ram


_IMPORTS = """
import sys
from orchestrator.__main__ import main
try:
    main()
finally:
    assert "numpy.ma" not in sys.modules
"""


@pytest.mark.parametrize("policy", ["lru", "dymoe", "dynaexq", "context", "mixed"])
def test_a_chat_loads_no_masked_arrays(tiny_model, policy):
    """No policy imports numpy.ma, which takes 2 MiB, and 9 MiB if Python has to compile it."""
    model = tiny_model("qwen3moe", "q8_0", "q2_k")
    asked = ("chat", "-m", model, f"--policy={policy}", "--expert-ram=3MiB", "-p", "hello")
    done = python("-c", _IMPORTS, *asked, "--ctx=256", "--max-tokens=4", "--threads=1")
    assert done.returncode == 0, done.stderr


def test_a_server_stays_within_the_smallest_ram_that_it_names(known, tmp_path, monkeypatch):
    """The peak with three clients at once, including pages of libraries, is at most --ram. This
    model leaves a sixth of --ram unused, the demo model 7 %."""
    pytest.importorskip("uvicorn", reason="uvicorn is missing: run `make build`")
    library_path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(capped, "ASKED", 3)
    serve = known["serve"]
    line = capped.Line([*serve.args, "--threads=1"], port=serve.port, clients=3)
    found, ram = line.run_least()
    assert found.status == 0, found.err
    # The rest is for requests that these clients do not send: a full context, long prompts and
    # bodies, probabilities, unread answers.
    assert 0.55 * ram < found.peak_bytes + found.library_bytes <= ram


def test_a_process_above_the_limit_is_killed(known):
    """Without --ram the same command exceeds the cgroup's limit and is killed."""
    found = capped.run(known["eval"].args, 24 << 20)
    assert found.status == -9
