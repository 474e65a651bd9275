"""``Opaque``: a pickled value in a buffer's file that was not unpickled, because the file was not trusted."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Opaque", "type_name"]


@dataclass(frozen=True, repr=False)
class Opaque:
    """A value that :meth:`Buffer.load <streamfold.Buffer.load>` leaves pickled unless it is given ``trusted=True``.

    Saving it again writes the same bytes. Two are equal if type and bytes are.

    Attributes:
        type_name: module and name of the value's type, as ``"collections.Counter"``. Only for people to read.
        data: the value, pickled. Unpickling it may run any code, if the file is of an unknown source.
    """

    type_name: str
    data: bytes

    def __repr__(self) -> str:
        return f"<Opaque {self.type_name}, {len(self.data)} bytes>"


def type_name(kind: type) -> str:
    """Module and qualified name of a type, as text that can be written as UTF-8."""
    return f"{kind.__module__}.{kind.__qualname__}".encode(errors="backslashreplace").decode()
