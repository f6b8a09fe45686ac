"""Compute parts of the lazy tensors of llama.cpp's converter.

The converter represents a tensor as a graph of torch and numpy calls over memory-mapped files
(`gguf.LazyBase`). The experts of a layer are one `torch.stack`. Computing such a tensor at once
needs twice the memory of a whole layer in float32. This module computes only the requested part: it
selects single tensors of a stack, and applies calls that do not affect the leading dimensions to a
part of their argument. The graph does not keep intermediate results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

# Calls that treat every number in the same way, regardless of its position.
_ELEMENTWISE = ("to", "float", "half", "bfloat16", "contiguous", "clone", "numpy", "astype")
_PARTS = ("split", "chunk")

Cuts = tuple[slice, ...]


class _Call(NamedTuple):
    """A method call on a lazy tensor that leaves the leading dimensions of the tensor unchanged.

    operand: the lazy tensor.
    n_free: number of unchanged leading dimensions. A slice of the result along these dimensions can
        be computed from the same slice of the operand.
    apply: function that calls the method on the computed operand, or on a slice of it.
    """

    operand: Any
    n_free: int
    apply: Callable[[Any], Any]


def compute(node: Any, cuts: Cuts = ()) -> Any:
    """Compute a part of a lazy tensor of llama.cpp's converter.

    A lazy tensor is a graph of the operations that will compute its values. Only the needed values
    are computed, if the operations allow that. Returns `node[cuts]`, with as many dimensions as
    `node`.

    node: the lazy tensor. An array or a torch tensor is only sliced.
    cuts: one slice with start and stop for each of the leading dimensions. An empty tuple computes
        the whole tensor.
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
    """Return whether some rows of a lazy tensor can be computed without the other rows.

    Rows are slices along the first dimension. If the result is False, the function `compute` of
    this module computes all rows, even if only some of them are requested.

    node: the lazy tensor, a graph of the operations that will compute its values. The result is
        True for an ordinary array.
    """
    if not _is_lazy(node) or node._data is not None or _stacked(node) is not None:
        return True
    if not any(map(_has_lazy, node._args)):
        return True  # The node is a view of a mapped file.
    call = _call(node)
    return call is not None and divisible(call.operand)


def _cut(value: Any, cuts: Cuts) -> Any:
    return value[cuts] if cuts else value


def _is_lazy(node: Any) -> bool:
    # hasattr() would not do: LazyBase forwards unknown attributes to its tensor.
    return "_func" in getattr(node, "__dict__", {})


def _has_lazy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_lazy, value))
    return _is_lazy(value)


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_whole, value))
    return compute(value) if _is_lazy(value) else value


def _stacked(node: Any) -> Any:
    """Return the tensors of which a lazy tensor is a stack along a new first dimension.

    Return None if the lazy tensor is not such a stack.
    """
    is_stack = getattr(node._func, "__name__", "") == "stack" and len(node._args) == 1
    return node._args[0] if is_stack and node._kwargs in ({}, {"dim": 0}) else None


def _call(node: Any) -> _Call | None:
    """Return the method call that computes a lazy tensor.

    Return None if the call may change the first dimension of its operand.
    """
    func, args, kwargs, index = node._func, node._args, node._kwargs, None
    if getattr(func, "__name__", "") == "eager_tuple_element":
        # The node is one of several results. LazyBase stores the call in a closure.
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
    """Return the name of the tensor method that the function of a lazy tensor calls.

    The result is "" if the name is unknown. The converter wraps most methods in lambdas. For these,
    the name is found in the lambda's code.
    """
    name = getattr(func, "__name__", "")
    if name != "<lambda>":
        return name if name in ("__getitem__", *_PARTS) else ""
    method = inspect.getclosurevars(func).nonlocals.get("name")
    if isinstance(method, str):
        return method
    names = func.__code__.co_names
    return names[0] if len(names) == 1 and names[0] in _ELEMENTWISE else ""


def _n_free(name: str, n_dims: int, rest: list[Any], kwargs: dict[str, Any]) -> int:
    """Return the number of leading dimensions that a method call leaves unchanged.

    name: name of the method of the tensor.
    n_dims: number of dimensions of the tensor.
    rest: the method's arguments without the tensor itself.
    """
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
    """Return the number of leading dimensions that an index selects completely.

    For [:, :, 3:5] the number is 2. It is 0 if the index contains anything but slices and a leading
    `...`.
    """
    first, *rest = index
    if first is Ellipsis:
        return n_dims - len(rest) if all(isinstance(each, slice) for each in rest) else 0
    if not all(isinstance(each, slice) for each in index):
        return 0
    return min((i for i, each in enumerate(index) if each != slice(None)), default=n_dims)
