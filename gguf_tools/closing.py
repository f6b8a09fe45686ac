"""A base class for objects that a `with` statement closes."""

from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    """Base class that makes a `with` statement call `close`, which the subclass defines."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
