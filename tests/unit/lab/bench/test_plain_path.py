"""llama.cpp's own path passes the same parameters to llama.cpp as upstream's best flags."""

import pytest

from gguf_tools import synthetic
from orchestrator.lab.bench import child
from orchestrator.lab.bench.cases import PLAIN, RESIDENT, UPSTREAM
from orchestrator.lab.bench.child import Job, decode, prompt

# Parameters that change neither the computation nor the place of weights: progress callback,
# timers, and the number of tokens with logits.
OTHER = {
    "progress_callback",
    "progress_callback_user_data",
    "no_perf",
    "n_outputs_max",
    "n_outputs_max_per_seq",
}


def plain(value):
    """A field's value in a form that can be compared."""
    return value if isinstance(value, bool | int | float) else bool(value)


@pytest.fixture
def asked(library, monkeypatch):
    """Parameters passed to llama.cpp: {"model": fields, "context": fields}."""
    from gguf_tools import built

    ll = built.bindings()

    found = {}

    def spy(name, at, function):
        def call(*arguments):
            params = arguments[at]
            found[name] = {key: plain(getattr(params, key)) for key, *_ in params._fields_}
            return function(*arguments)

        return call

    for name, function in (
        ("model", "llama_model_load_from_file"),
        ("context", "llama_init_from_model"),
    ):
        monkeypatch.setattr(ll, function, spy(name, 1, getattr(ll, function)))
    return found


def test_both_paths_ask_llama_cpp_for_the_same(asked, tmp_path):
    path = synthetic.write(tmp_path / "m.gguf", "tiny-olmoe")
    seen = {}
    repacked = UPSTREAM[0]
    for case in (repacked, next(case for case in RESIDENT if case.name == PLAIN)):
        job = Job(
            case.system,
            str(path),
            None,
            dict(case.settings),
            n_ctx=256,
            n_ubatch=16,
            threads=1,
            parts=[prompt(4), decode(1, 1.0)],
            seed=1,
        )
        (child.run_engine if case.system == "engine" else child.run_upstream)(job)
        seen[case.name] = {what: dict(fields) for what, fields in asked.items()}
    for what in ("model", "context"):
        ours, theirs = seen[PLAIN][what], seen[repacked.name][what]
        assert len(ours) > 15
        different = {key for key in ours if ours[key] != theirs[key]}
        assert different <= OTHER, {key: (ours[key], theirs[key]) for key in different - OTHER}
    assert seen[PLAIN]["model"]["use_extra_bufts"] is True
