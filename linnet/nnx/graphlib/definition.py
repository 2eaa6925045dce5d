"""Definition: what an object is, without its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from linnet.nnx.kinds import ARRAY, DICT, LIST, OBJECT, REF, STATIC, VARIABLE

Path = tuple[Any, ...]


class Definition(NamedTuple):
    """One node of what a walk found: hashable, comparable, and the same for equal objects.

    Things with an identity (objects, Variables, lists, dicts) are numbered as the walk meets them,
    and a second visit gives a reference to the number of the first.

    Attributes:
      kind: of ``linnet.nnx.kinds``.
      form: what it is made of. The class of an object, Variable or container; JAX's structure of a
        registered pytree; the function of a method and a static value, each as ``Static``; the
        number that a reference refers to.
      names: the keys of the children, in the order of the walk.
      children: their definitions.
      own: the static part of an object or container; the metadata of a Variable.
      order: the keys of a dict or pytree in their own order, the length of a list or tuple, the
        marks of an object.
    """

    kind: int
    form: Any = None
    names: tuple[Any, ...] = ()
    children: tuple[Any, ...] = ()
    own: Any = None
    order: Any = None

    def items(self) -> Iterable[tuple[Any, Definition]]:
        """The children with their keys."""
        return zip(self.names, self.children, strict=True)

    def at(self, path: Path) -> Definition:
        """What stands at a path."""
        found = self
        for step in path:
            found = dict(found.items())[step]
        return found

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Definition]]:
        """The Variables and arrays with their paths, in the order in which a walk meets them."""
        if self.kind in (VARIABLE, ARRAY):
            yield path, self
        else:
            for name, child in self.items():
                yield from child.leaves((*path, name))

    @property
    def is_numbered(self) -> bool:
        """Whether it is something with an identity, met for the first time."""
        return self.kind in (OBJECT, VARIABLE, LIST, DICT)

    @property
    def text(self) -> str:
        """A name for messages."""
        if self.kind == ARRAY:
            return "an array"
        if self.kind == REF:
            return "a shared reference"
        if self.kind == STATIC:
            return repr(self.form.value)
        return getattr(self.form, "__name__", str(self.form))


LEAF = Definition(ARRAY)


def reference(number: int) -> Definition:
    """A second visit to the thing of that number."""
    return Definition(REF, number)
