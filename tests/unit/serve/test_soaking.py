"""The soaks of tests/helpers/soaking.py, for seconds in the place of minutes."""

from pathlib import Path

from soaking import soak_clients, soak_requests

DEMO = Path(__file__).resolve().parents[3] / "models/demo/moe-edge-demo.gguf"


def test_clients_at_once_get_answers_or_are_told_to_come_later(tmp_path, library):
    statuses = soak_clients(tmp_path, DEMO, clients=8, seconds=5, share=0.6)
    assert statuses[200] and statuses[429]


def test_memory_does_not_grow_once_the_prompt_cache_is_full(tmp_path, library):
    first, last = soak_requests(tmp_path, DEMO, requests=40, cache_ram="1MiB")
    # So few requests do not yet settle an allocator.
    assert last < 1.1 * first
