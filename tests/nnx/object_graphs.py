"""Random object graphs, and an account of one that owes nothing to the library.

``portrait`` writes a graph down by plain attribute access: what is where, what is the same thing
twice, every static value with its exact type, every array. Two graphs are isomorphic when their
portraits are equal, which is what the laws in ``graphlib/test_properties.py`` are stated in.
"""

import copy
import dataclasses
import enum
import functools
import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from linnet import nnx
from tests.compare import is_key
from tests.models import Config, Count, Pair


class Node(nnx.Module):
    def double(self, x):
        return 2 * x

    def triple(self, x):
        return 3 * x


class Leaf(nnx.Pytree):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    content: Any
    label: str = dataclasses.field(default="box", metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    width: int


class ArraySettings:  # an equality of its own, no hash, and arrays
    def __init__(self, n):
        self.table, self.scale = np.float32([n, n + 1]), jnp.float32(n)

    def __eq__(self, other):
        tables = self.table, other.table
        return bool(np.array_equal(*tables)) and bool(self.scale == other.scale)

    __hash__ = None

    def __repr__(self):
        return f"ArraySettings({self.table.tolist()}, {float(self.scale)})"


class HashedOptions:  # an equality and a hash by its contents, which change in place all the same
    def __init__(self, n):
        self.size = n

    def __eq__(self, other):
        return type(other) is HashedOptions and self.size == other.size

    def __hash__(self):
        return hash(self.size)

    def __repr__(self):
        return f"HashedOptions({self.size})"


def user_dict(n):
    """A container without a hash, whose equality fails for arrays that are not the same ones."""
    return UserDict(table=np.float32([n, n + 1]), scale=jnp.float32([n, n]))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def half(x, by=2):
    return x / by


def adder(n):
    return lambda x: x + n


STATICS = st.sampled_from(
    [
        *(0, 1, 2, True, False, 1.0, 0.0, -0.0, float("inf"), 1j, "", "a", b"a", None, ...),
        *((), (1, 2), (1, True), (0.0, -0.0), ("a", (1,)), range(3), slice(1, 2)),
        *([], [1], [True], [[1], {"k": [2]}], {}, {"k": 1}, {"k": 1.0}, {1, 2}, frozenset({1})),
        *(
            Config(1),
            Config(2),
            FrozenConfig(1),
            ArraySettings(1),
            ArraySettings(2),
            Colour.RED,
            Colour.BLUE,
            int,
            jnp.float32,
        ),
        *(np.dtype("int8"), np.float32(0.0), np.float32(-0.0), half, np.tanh, adder(1), adder(2)),
        *(lambda x: x, functools.partial(half, by=3), functools.partial(half, by=4)),
    ]
).map(lambda x: copy.deepcopy(x) if isinstance(x, list | dict | set) else x)
NAMES = st.sampled_from("abcde")
ARRAYS = st.sampled_from(
    [np.arange(3), np.float32([[1, 2]]), jnp.arange(2.0), jnp.int32(7), jax.random.key(0)]
)
KINDS = st.sampled_from([nnx.Variable, nnx.Param, nnx.BatchStat, nnx.Intermediate, Count])
METADATA = st.sampled_from([{}, {}, {"tag": "noise"}, {"role": 1}, {"role": True}])


@st.composite
def graphs(draw, shared=True, methods=True, marks=True):
    """An object with anything below it.

    Args:
      draw: from hypothesis.
      shared: let things stand in several places, which makes cycles too.
      methods: store bound methods of other objects.
      marks: assign some attributes as ``nnx.data(...)`` or ``nnx.static(...)``.
    """
    objects, things = [], []

    def keep(thing):
        things.append(thing)
        return thing

    def array():
        return draw(ARRAYS)

    def variable():
        value = draw(st.sampled_from([array, lambda: {"x": array(), "y": [array()]}]))()
        return keep(draw(KINDS)(value, **draw(METADATA)))

    def node(depth):
        obj = keep(draw(st.sampled_from([Node, Leaf]))())
        objects.append(obj)
        for name in draw(st.lists(NAMES, unique=True, min_size=depth // 2, max_size=5)):
            setattr(obj, name, marked(value(depth - 1)))
        if draw(st.booleans()) and isinstance(obj, Node):
            obj.own = obj.double
        return obj

    def marked(x):
        if not marks or draw(st.integers(0, 5)):
            return x
        return nnx.data(x) if holds_data(x) or draw(st.booleans()) else nnx.static(x)

    def elements(depth):
        return [value(depth - 1) for _ in range(draw(st.integers(0, 4)))]

    def entries(depth):
        names = draw(st.lists(NAMES, unique=True, max_size=4))
        return {name: value(depth - 1) for name in names}

    def method():
        owners = [obj for obj in objects if isinstance(obj, Node)]
        return draw(st.sampled_from(owners)).triple if owners else half

    def value(depth):
        makers = [variable, variable, array, lambda: draw(STATICS)]
        if depth > 0:
            deeper = [
                *[lambda: node(depth)] * 4,
                lambda: keep(nnx.List(elements(depth))),
                lambda: keep(nnx.Dict(entries(depth))),
                lambda: keep(elements(depth)),
                lambda: keep(entries(depth)),
                lambda: tuple(elements(depth)),
                lambda: Pair(value(depth - 1), value(depth - 1)),
                lambda: Box(variable(), draw(NAMES)),
                lambda: OrderedDict(z=variable(), a=variable()),
                lambda: defaultdict(int, z=variable(), a=variable()),
                lambda: nnx.State({"s": {"t": variable()}}),
            ]
            makers += deeper
        if shared and things:
            makers += [lambda: draw(st.sampled_from(things))] * 3
        if methods:
            makers.append(method)
        return draw(st.sampled_from(makers))()

    return node(4)


# ---- portraits ----------------------------------------------------------------------------------


def static_portrait(x):
    """A static value told apart by type and sign, containers and functions by what they hold."""
    if isinstance(x, float | np.floating):
        return (type(x), float(x).hex())
    if isinstance(x, (list, tuple)):
        return (type(x), [static_portrait(item) for item in x])
    if isinstance(x, dict):
        return (dict, [(static_portrait(k), static_portrait(v)) for k, v in x.items()])
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        return (x.__code__, static_portrait(x.__defaults__), static_portrait(cells))
    if isinstance(x, functools.partial):
        return (functools.partial, *map(static_portrait, (x.func, x.args, x.keywords)))
    return (type(x), x)


def array_portrait(x):
    if is_key(x):
        x = jax.random.key_data(x)
    return (str(x.dtype), x.shape, np.asarray(x).tobytes())


def holds_data(x):
    if isinstance(x, (nnx.Variable, nnx.Pytree, jax.Array, np.ndarray, Box, nnx.State)):
        return True
    if isinstance(x, types.MethodType):
        return isinstance(x.__self__, nnx.Pytree)
    if isinstance(x, (OrderedDict, defaultdict)):
        return True
    return isinstance(x, (list, tuple, dict)) and any(map(holds_data, items(x).values()))


def items(x):
    """What is directly inside anything that has an inside, by key."""
    if isinstance(x, nnx.List):
        return dict(enumerate(x))
    if isinstance(x, (nnx.Dict, nnx.State, dict)):
        return dict(x)
    if isinstance(x, Pair):
        return x._asdict()
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    if isinstance(x, Box):
        return {"content": x.content}
    return dict(vars(x)) if isinstance(x, nnx.Pytree) else {}


def children(x):
    """The same in the order of keys; the order of entries is shown beside it."""
    inside = items(x)
    return [(key, inside[key]) for key in sorted(inside, key=str)]


def portrait(root, values=True):
    """Nested tuples that two graphs share exactly when they are isomorphic."""
    numbers = {}

    def visit(x):
        if isinstance(x, types.MethodType) and isinstance(x.__self__, nnx.Pytree):
            return ("method", x.__func__.__name__, visit(x.__self__))
        if not holds_data(x):
            return ("static", static_portrait(x))
        if isinstance(x, (jax.Array, np.ndarray)):
            return array_portrait(x) if values else "array"
        if has_identity(x):
            if id(x) in numbers:
                return ("again", numbers[id(x)])
            numbers[id(x)] = len(numbers)
        if isinstance(x, nnx.Variable):
            leaves = jax.tree.leaves(x.raw_value)
            shown = [array_portrait(leaf) for leaf in leaves] if values else None
            return (type(x), static_portrait(x.get_metadata()), shown)
        order = tuple(items(x)) if isinstance(x, (dict, nnx.Dict)) else None
        head = (type(x), getattr(x, "label", None) if isinstance(x, Box) else None, order)
        # Methods last: their owner is shown where it really stands.
        inside = sorted(children(x), key=lambda item: isinstance(item[1], types.MethodType))
        return (head, [(key, visit(child)) for key, child in inside])

    return visit(root)


def reachable(root):
    """Everything with data and an identity below ``root``, each once."""
    found, pending = {}, [root]
    while pending:
        x = pending.pop()
        if isinstance(x, types.MethodType):
            x = x.__self__
        if not holds_data(x) or isinstance(x, (jax.Array, np.ndarray)):
            continue
        if id(x) not in found:
            found[id(x)] = x
            pending += [child for _, child in children(x)]
    return [x for x in found.values() if has_identity(x)]


def has_identity(x):
    known = (nnx.Variable, nnx.Pytree, list, dict)
    return isinstance(x, known) and not isinstance(x, (OrderedDict, defaultdict))


def variables(root):
    return [x for x in reachable(root) if isinstance(x, nnx.Variable)]


def at(root, path):
    """What stands at a path, step by step."""
    for step in path:
        root = root.__self__ if step == "__self__" else items(root)[step]
    return root


def refill(root):
    """Gives every Variable other numbers of the same shape and dtype."""
    for variable in variables(root):
        variable.set_raw_value(jax.tree.map(other_numbers, variable.raw_value))


def other_numbers(x):
    if is_key(x):
        return jax.random.fold_in(x, 1)
    return x + np.ones((), x.dtype)
