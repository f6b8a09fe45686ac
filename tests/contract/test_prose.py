"""The check of the code's English finds unclear sentences and accepts clear ones."""

import prose
import pytest
from prose import COMMENT, DOCSTRING, EXCEPTIONS, MESSAGE, MOST_EXCEPTIONS, Text

# (kind, an unclear text, the same in plain English).
PAIRS = (
    (
        DOCSTRING,
        "Returns once what ended computes nothing any more: where others than the engine decode.",
        "Blocks until every finished request has stopped computing. The server sets this, because "
        "it decodes outside the engine.",
    ),
    (
        DOCSTRING,
        "Counts of steps whose reports went without them.",
        "Expert counts accumulated since the last report that included counts.",
    ),
    (
        DOCSTRING,
        "where an answer begins, what its first token waits for is done.",
        "At the start of an answer, waits for the transitions that the policy requires.",
    ),
    (
        DOCSTRING,
        "What goes with the steps of a model whose experts nobody manages: nothing.",
        "No-op driver for models that run on llama.cpp's own path.",
    ),
    (
        DOCSTRING,
        "A policy that has a loss to spend, its setting max_loss, and has to know what choices "
        "cost.",
        "A policy with a loss budget (`max_loss`). It needs an estimate of what each choice costs.",
    ),
    (
        DOCSTRING,
        "of single ones in every layer, its first layers would push out what the later ones were "
        "to find.",
        "With one global LRU, experts of early layers would evict experts that later layers are "
        "about to use.",
    ),
    (
        DOCSTRING,
        "Has a record with other values of live settings from the next step on.",
        "Replaces the settings. Takes effect at the next step.",
    ),
    (
        DOCSTRING,
        "What pack, export and convert have written",
        "Summary of the files written by pack, export and convert.",
    ),
    (
        MESSAGE,
        "`--tokens`: What has room",
        "`--max-tokens`: Maximum length of the answer, in tokens. Default: the rest of the "
        "context.",
    ),
    (
        MESSAGE,
        "It loses nothing. With --max-loss 0.01 it would answer about 1.8 times as fast here.",
        "Lossless. --max-loss 0.01 would be about 1.8x faster on this machine.",
    ),
)
LONG = "The store reads " + "one more expert and then " * 6 + "it stops.\n"


def found_in(tmp_path, name, source):
    """The (line, phrase) pairs that the check finds in a file."""
    path = tmp_path / name
    path.write_text(source)
    findings, _ = prose.examine(path, name)
    return [(each.line, each.found) for each in findings]


def is_clear(kind, text):
    return not list(prose.faults_of_text(Text(kind, 1, text)))


def test_eight_of_ten_unclear_texts_are_found():
    missed = [before for kind, before, _ in PAIRS if is_clear(kind, before)]
    assert len(PAIRS) == 10 and len(missed) <= 2, missed


@pytest.mark.parametrize(("kind", "text"), [(kind, after) for kind, _, after in PAIRS])
def test_a_clear_text_is_accepted(kind, text):
    assert not list(prose.faults_of_text(Text(kind, 1, text)))


def test_a_finding_names_the_place_the_phrase_and_the_remedy(tmp_path):
    path = tmp_path / "one.py"
    path.write_text('"""A store."""\n\n# Reads in the place\n# of the policy.\n')
    (finding,), _ = prose.examine(path, "one.py")
    assert str(finding) == "one.py:3: 'in the place of': instead of"


def test_every_part_of_a_python_file_is_read(tmp_path):
    source = (
        '"""What the store is."""\n'
        "tier = 1  # the tier of somebody\n"
        "def brought(whose):\n"
        '    """Return the tier.\n\n    It is resident, nobody waits for it.\n    """\n'
        '    raise ValueError(f"{tier} lies in a slot")\n'
        'print("no # comment: the reads are behind")\n'
        f'"""{LONG}"""\n'
    )
    assert found_in(tmp_path, "orchestrator/one.py".replace("/", "_"), source) == [
        (1, "What"),
        (2, "somebody"),
        (3, "brought"),
        (3, "whose"),
        (6, "nobody"),
        (8, "lies in"),
        (9, "behind"),
        (10, "The store reads one ..."),
    ]


def test_every_part_of_a_native_file_is_read(tmp_path):
    source = (
        "// A slot.\n"
        "/* The copies of\n"
        " * nobody. */\n"
        "int told = 1;  // of the slot\n"
        'const char * text = "http://host is "\n    "behind a proxy";\n'
        "// What the store reads.\n"
    )
    assert found_in(tmp_path, "one.cpp", source) == [
        (3, "nobody"),
        (4, "told"),
        (5, "behind"),
        (7, "What"),
    ]


def test_code_and_questions_are_no_prose(tmp_path):
    source = (
        '"""Return `what` of the store, and the `nobody` user."""\n'
        'QUESTION = "What is the capital of Norway?"\n'
        'WORDS = "behind beside alike nobody".split()\n'
    )
    assert found_in(tmp_path, "one.py", source) == []


def test_training_data_are_no_messages(tmp_path):
    path = tmp_path / "tales.py"
    path.write_text('A = ["the cat hid behind the door"]\nprint("the cat hid behind the door")\n')
    findings, _ = prose.examine(path, "models/demo/training/tales.py")
    assert [each.line for each in findings] == [2]


def test_a_long_sentence_is_found_and_two_sentences_are_not():
    assert not is_clear(COMMENT, LONG)
    assert is_clear(COMMENT, LONG.replace("then one", "stops. Then one", 1).replace("and", ".", 3))


def test_public_names_without_a_docstring_are_counted(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(
        "class A:\n    def b(self): pass\n    def _c(self): pass\n"
        '    def d(self):\n        """Return 1."""\n        def e(): pass\n'
    )
    assert prose.examine(path, "one.py")[1] == 3  # the module, A and A.b


def test_exceptions_are_few_and_have_reasons():
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS == 20
    assert len({each[:3] for each in EXCEPTIONS}) == len(EXCEPTIONS)
    assert all(len(each.reason.split()) >= 3 for each in EXCEPTIONS)
