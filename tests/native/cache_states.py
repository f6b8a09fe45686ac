"""All caches that the native one may be, while it is not known how far the disk has come."""

from __future__ import annotations

from collections.abc import Callable

from .cache_model import Cache
from .cache_parts import SKIP, Layout, Visit


class Caches:
    """All states that agree with what was seen. Beyond max_states it gives up and is `lost`:
    what may be the case then depends on too much that nobody saw."""

    def __init__(self, layout: Layout, max_states: int) -> None:
        self.states = [Cache(layout)]
        self.max_states = max_states
        self.lost = False

    def _let_the_disk_run(self) -> None:
        """Any number of disk steps may have been taken since the last look."""
        found = {state.key(): state for state in self.states}
        todo = list(found.values())
        while todo and not self._give_up(len(found) // 10):
            state = todo.pop()
            for step in state.disk_steps():
                after = state.copy()
                step(after)
                if (key := after.key()) not in found:
                    found[key] = after
                    todo.append(after)
        self.states = list(found.values())

    def _give_up(self, n_states: int) -> bool:
        self.lost = self.lost or n_states > self.max_states
        return self.lost

    def do(self, change: Callable[[Cache], None]) -> None:
        """One request, at some moment of the disk's work."""
        if not self.lost:
            self._let_the_disk_run()
            for state in self.states:
                change(state)

    def keep(self, agrees: Callable[[Cache], bool]) -> bool:
        """Something was seen at some moment; False if no legal outcome shows it."""
        if not self.lost:
            self._let_the_disk_run()
        found = [state for state in self.states if agrees(state)]
        if found and not self.lost:
            self.states = found
            self._give_up(len(found))
        return bool(found) or self.lost

    def use(self, layer: int, kind: int, experts: list[int], visits: list[Visit]) -> bool:
        """An op computed these experts, and met them in the order of visits. Takes what is
        ready, computes it, gives it back, waits for more; False if that cannot be."""
        done: dict[object, Cache] = {}
        seen: set[object] = set()
        todo = [(state.copy(), 0, 0, False) for state in self.states]
        while todo and not self._give_up(len(seen) // 10):
            state, n_visited, n_taken, again = todo.pop()
            key = (state.key(), n_visited, n_taken, again)
            if key in seen:
                continue
            seen.add(key)
            for step in state.disk_steps():
                after = state.copy()
                step(after)
                todo.append((after, n_visited, n_taken, again))
            if n_taken:
                end = n_visited + n_taken
                state.release(layer, kind, [expert for expert, _ in visits[n_visited:end]])
                if end == len(visits):
                    done[state.key()] = state
                else:
                    todo.append((state, end, 0, True))
                continue
            gone = {expert for expert, _ in visits[:n_visited]}
            ready = state.ready(layer, kind, [e for e in experts if e not in gone])
            if not ready:  # it looks for slots once more, and waits
                state.serve_kind(layer, kind)
                todo.append((state, n_visited, 0, again))
            elif ready == visits[n_visited : n_visited + len(ready)]:
                after = state.copy()
                after.count("waves", again)
                for _, tier in ready:
                    if tier != SKIP:
                        after.count_phase(f"computed {tier}")
                todo.append((after, n_visited, len(ready), again))
        if done and not self.lost:
            self.states = list(done.values())
            self._give_up(len(done))
        return bool(done) or self.lost
