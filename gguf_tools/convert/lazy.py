"""Pieces of the tensors that upstream's converter has promised but not yet computed.

The converter describes a tensor by a graph of torch and numpy calls over memory-mapped
files (``gguf.LazyBase``), the experts of a layer as one ``torch.stack``. Computing such a
tensor whole takes the memory of a whole layer in float32, twice. Here a piece is computed from
pieces: one of the tensors that a stack holds, or a part of the argument of a call that leaves the
leading dimensions alone. Nothing is kept in the graph, so what was computed is freed with the
result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

# These calls do the same to every number, whatever its place.
_ELEMENTWISE = ("to", "float", "half", "bfloat16", "contiguous", "clone", "numpy", "astype")
_PARTS = ("split", "chunk")

Cuts = tuple[slice, ...]


class _Call(NamedTuple):
    """A call that leaves the first ``n_free`` dimensions of its operand alone, so that they may be
    cut before it instead of after."""

    operand: Any
    n_free: int
    apply: Callable[[Any], Any]


def compute(node: Any, cuts: Cuts = ()) -> Any:
    """The part ``node[cuts]`` of a lazy tensor, or of an array or tensor that is there.

    cuts: slices with start and stop, of the leading dimensions, the first one first. All
    dimensions stay. The result is the whole where nothing is cut.
    """
    if not _is_lazy(node):
        return _cut(node, cuts)
    if node._data is not None:
        return _cut(node._data, cuts)
    if (tensors := _stacked(node)) is not None:
        chosen = tensors[cuts[0]] if cuts else tensors
        return node._func([compute(each, cuts[1:]) for each in chosen], **node._kwargs)
    call = _call(node)
    if call is None:
        return _cut(node._func(*map(_whole, node._args), **node._kwargs), cuts)
    value = call.apply(compute(call.operand, cuts[: call.n_free]))
    rest = cuts[call.n_free :]
    return _cut(value, (slice(None),) * call.n_free + rest if rest else ())


def divisible(node: Any) -> bool:
    """Whether ``compute`` of one step along the first dimension does not compute the whole."""
    if not _is_lazy(node) or node._data is not None or _stacked(node) is not None:
        return True
    if not any(map(_holds_lazy, node._args)):
        return True  # The node is a view of a mapped file.
    call = _call(node)
    return call is not None and divisible(call.operand)


def _cut(value: Any, cuts: Cuts) -> Any:
    return value[cuts] if cuts else value


def _is_lazy(node: Any) -> bool:
    # LazyBase answers every other name by asking the tensor it stands for.
    return "_func" in getattr(node, "__dict__", {})


def _holds_lazy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_lazy, value))
    return _is_lazy(value)


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_whole, value))
    return compute(value) if _is_lazy(value) else value


def _stacked(node: Any) -> Any:
    """The tensors that a node stacks along a new first dimension; None where it does not."""
    is_stack = getattr(node._func, "__name__", "") == "stack" and len(node._args) == 1
    return node._args[0] if is_stack and node._kwargs in ({}, {"dim": 0}) else None


def _call(node: Any) -> _Call | None:
    """What a node calls; None where that is not known to leave any dimension alone."""
    func, args, kwargs, index = node._func, node._args, node._kwargs, None
    if getattr(func, "__name__", "") == "eager_tuple_element":
        # The node is one of several results. LazyBase keeps the call itself in the closure.
        (args, _), index = args
        func = inspect.getclosurevars(func).nonlocals["fn"]
    if not args or not _is_lazy(args[0]):
        return None
    operand, *rest = args
    name = _name(func)
    if (index is None) == (name in _PARTS):
        return None
    n_free = _n_free(name, len(operand.shape), rest, kwargs)

    def apply(value: Any) -> Any:
        result = func(value, *rest, **kwargs)
        return result if index is None else result[index]

    return _Call(operand, n_free, apply) if n_free > 0 else None


def _name(func: Callable[..., Any]) -> str:
    """The name of the method that a call stands for, which LazyBase's own lambdas call on their
    argument; empty where that is not known."""
    name = getattr(func, "__name__", "")
    if name != "<lambda>":
        return name if name in ("__getitem__", *_PARTS) else ""
    method = inspect.getclosurevars(func).nonlocals.get("name")
    if isinstance(method, str):
        return method
    names = func.__code__.co_names
    return names[0] if len(names) == 1 and names[0] in _ELEMENTWISE else ""


def _n_free(name: str, n_dims: int, rest: list[Any], kwargs: dict[str, Any]) -> int:
    """How many leading dimensions a method leaves alone. rest: its arguments but the first."""
    if name in _ELEMENTWISE:
        return n_dims
    if name == "transpose" and all(isinstance(each, int) for each in rest):
        return min(int(each) % n_dims for each in rest)
    if name == "permute":
        order = rest[0] if isinstance(rest[0], (list, tuple)) else rest
        moved = [i for i, each in enumerate(order) if int(each) % n_dims != i]
        return min(moved, default=n_dims)
    if name in _PARTS:
        dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
        return int(dim) % n_dims
    if name == "__getitem__" and isinstance(rest[0], tuple):
        return _n_untouched(rest[0], n_dims)
    return 0


def _n_untouched(index: tuple[Any, ...], n_dims: int) -> int:
    """How many leading dimensions an index of slices takes whole."""
    first, *rest = index
    if first is Ellipsis:
        return n_dims - len(rest) if all(isinstance(each, slice) for each in rest) else 0
    if not all(isinstance(each, slice) for each in index):
        return 0
    return min((i for i, each in enumerate(index) if each != slice(None)), default=n_dims)
