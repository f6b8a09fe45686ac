"""What is closed at the end of a `with`."""

from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    """Its close is called at the end of a `with`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
