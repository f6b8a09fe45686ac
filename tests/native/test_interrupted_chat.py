"""After Ctrl-C at random moments of a chat with slow reads, the next question is answered."""

import shutil

import pytest
from interrupted_chat import MOMENTS, REPO, Chats, slow_reads, tiny_model

TIMES = 12


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the slow reads")
def test_every_question_is_answered(library, tmp_path):
    path, ram = tiny_model(tmp_path)
    args = ["-m", str(path), f"--ram={ram}", "--threads=1", "--temp=0", "--policy=lru"]
    environment = {"PYTHONPATH": str(REPO), **slow_reads(tmp_path)}
    chats = Chats([*args, "--max-tokens=4"], tmp_path, environment, span_s=0.6)
    chats.run(TIMES, a_process=TIMES // 2)
    assert chats.wrong == []
    assert chats.answers == dict.fromkeys(MOMENTS, TIMES // len(MOMENTS))
