"""Pieces of the tensors that upstream's converter has promised but not yet computed.

The converter describes a tensor by a graph of torch and numpy calls over memory-mapped
files (``gguf.LazyBase``), the experts of a layer as one ``torch.stack``. Computing such a
tensor whole takes the memory of a whole layer in float32, twice; here a piece is computed
from pieces: what a stack holds at one place, an element-wise call over a part of its
argument. Nothing is kept in the graph, so what was computed is freed with the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# Calls that do the same to every number, whatever its place.
_ELEMENTWISE = ("to", "float", "half", "bfloat16", "contiguous", "clone", "numpy", "astype")

Cuts = tuple[slice, ...]


def compute(node: Any, cuts: Cuts = ()) -> Any:
    """The part ``node[cuts]`` of a lazy tensor, or of an array or tensor that is there.

    cuts: slices with start and stop, of the leading dimensions, first one first. All
    dimensions stay. Whole where nothing is cut.
    """
    if not _is_lazy(node):
        return _cut(node, cuts)
    if node._data is not None:
        return _cut(node._data, cuts)
    step = _step(node)
    if step == "stack":
        tensors = node._args[0][cuts[0]] if cuts else node._args[0]
        return node._func([compute(each, cuts[1:]) for each in tensors], **node._kwargs)
    n_free = _n_free(node, step)
    if not n_free:
        return _cut(node._func(*map(_whole, node._args), **node._kwargs), cuts)
    value = node._func(compute(node._args[0], cuts[:n_free]), *node._args[1:], **node._kwargs)
    rest = cuts[n_free:]
    return _cut(value, (slice(None),) * n_free + rest if rest else ())


def divisible(node: Any) -> bool:
    """Whether ``compute`` of one step along the first dimension does not compute the whole."""
    if not _is_lazy(node) or node._data is not None or not _inputs(node):
        return True
    step = _step(node)
    if step == "stack":
        return True
    return bool(_n_free(node, step)) and divisible(node._args[0])


def _cut(value: Any, cuts: Cuts) -> Any:
    return value[cuts] if cuts else value


def _is_lazy(node: Any) -> bool:
    # LazyBase answers every other name by asking the tensor it stands for.
    return "_func" in getattr(node, "__dict__", {})


def _inputs(node: Any) -> bool:
    """Whether anything lazy is below; a node without is a view of a mapped file."""
    return any(map(_holds_lazy, node._args))


def _holds_lazy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_lazy, value))
    return _is_lazy(value)


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_whole, value))
    return compute(value) if _is_lazy(value) else value


def _step(node: Any) -> str:
    """What a node calls: ``stack``, a method's name, or nothing where it is not known."""
    func: Callable[..., Any] = node._func
    name = getattr(func, "__name__", "")
    if name == "stack" and node._kwargs in ({}, {"dim": 0}) and len(node._args) == 1:
        return "stack"
    if name == "<lambda>":
        return _method_of(func)
    return name if name == "__getitem__" else ""


def _method_of(func: Callable[..., Any]) -> str:
    """The method that one of LazyBase's own lambdas calls on its argument."""
    name = inspect.getclosurevars(func).nonlocals.get("name")
    if isinstance(name, str):
        return name
    names = func.__code__.co_names
    return names[0] if len(names) == 1 and names[0] in _ELEMENTWISE else ""


def _n_free(node: Any, step: str) -> int:
    """How many leading dimensions of a node may be cut before its call instead of after."""
    if not node._args or not _is_lazy(node._args[0]):
        return 0
    n_dims = len(node._args[0].shape)
    if step in _ELEMENTWISE:
        return n_dims
    last_two = {-1, -2}
    if step == "transpose" and set(node._args[1:]) == last_two:
        return n_dims - 2
    if step == "__getitem__" and isinstance(node._args[1], tuple):
        first, *rest = node._args[1]
        if first is Ellipsis and all(isinstance(each, slice) for each in rest):
            return n_dims - len(rest)
    return 0
