"""Accuracy in tasks of lm_eval (models/real/accuracy.py)."""

import json
import lzma
import zipfile

import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install -e '.[eval]'")

from models.real import accuracy

SENTENCES = [("the dog runs", "the dog run"), ("she sees herself", "she sees himself"), ("a", "b")]


def write(data, correct):
    """Write the questions of both tasks. `correct` is the index of the correct sentence."""
    arc, _, _ = accuracy.TASKS[0].questions.partition("::")
    blimp, _, inside = accuracy.TASKS[1].questions.partition("::")
    for name in (arc, blimp):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
    records = [{"question": "Which?", "choices": each, "answer": correct} for each in SENTENCES]
    with lzma.open(data / arc, "wt") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
    with zipfile.ZipFile(data / blimp, "w") as archive:
        pairs = [{"sentence_good": s[correct], "sentence_bad": s[1 - correct]} for s in SENTENCES]
        archive.writestr(inside, "".join(json.dumps(pair) + "\n" for pair in pairs))


def test_each_item_has_one_correct_sentence(tiny_model, tmp_path):
    """If the other sentence of each item becomes the correct one, the model solves exactly the
    items that it did not solve before."""
    model, found = tiny_model("qwen3moe", "q8_0", "q4_k"), []
    for correct in (0, 1):
        data = tmp_path / str(correct)
        write(data, correct)
        tasks = [task.write(data, data) for task in accuracy.TASKS]
        found.append(accuracy.solved(f"{model},policy=lru,high_tier=q4_k", tasks, 3, 1))
    assert list(found[0]) == [task.name for task in accuracy.TASKS]
    for name in found[0]:
        assert (found[0][name] + found[1][name]).tolist() == [1.0] * len(SENTENCES), name


@pytest.mark.parametrize("damage", ["no folder", "no archive", "no task"])
def test_missing_questions_are_one_sentence(tmp_path, capsys, monkeypatch, damage):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")  # restores what the command changes
    if damage != "no folder":
        write(tmp_path, 0)
        archive = tmp_path / accuracy.TASKS[1].questions.partition("::")[0]
        archive.write_bytes(b"damaged")
        if damage == "no task":
            with zipfile.ZipFile(archive, "w") as other:
                other.writestr("other.jsonl", "")
    assert accuracy.main(["model.gguf", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}") and said.count("\n") == 1
