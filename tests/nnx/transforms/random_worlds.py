"""Random worlds for ``test_random_programs.py``: objects of every kind, and an account of them.

A world is built from a recipe, a list of ingredients. Two worlds from one recipe are alike, so the
same program can run under ``nnx.jit`` in one and eagerly in the other. ``account`` writes down all
that is in a world by plain attribute access, and owes nothing to the library's own traversals.
"""

import functools
import types
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet import nnx
from tests.compare import is_key
from tests.nnx.object_graphs import (
    ArraySettings,
    Box,
    Config,
    Count,
    HashedOptions,
    Pair,
    children,
    has_identity,
    holds_data,
    items,
    user_dict,
)

NAMES = "abcdefgh"


class Node(nnx.Module):
    """An object for anything, with a rule that other classes change."""

    def rule(self):
        return 1

    def double(self, x):
        return 2 * x


class Quantized(Node):
    def rule(self):
        return 2


class Wayward(Node):
    """Stores its attributes in its own way."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


class Wilful(Node):
    """Stores its attributes in yet another way."""

    def __setattr__(self, name, value):
        self.__dict__[name] = value


class Trained(nnx.Module):
    """What an optimizer is built for; its shapes stay as they are."""

    def __init__(self, n):
        self.b = nnx.Param(jnp.float32(n))
        self.w = nnx.Param(jnp.full(2, n + 1.0))


# Objects that are changed through their own methods alone.
SEALED = (nnx.Rngs, nnx.RngStream, nnx.Optimizer, Trained)
CONTAINERS = (list, dict, nnx.List, nnx.Dict)


# ---- places -------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where something stands; it does not keep alive what stands there."""

    holder: Any
    key: Any

    def get(self):
        return items(self.holder)[self.key]

    def set(self, value):
        if isinstance(self.holder, CONTAINERS):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    def replace(self, make, *args):
        put_at_the_same_address(self.get, self.set, make, *args)

    def delete(self):
        if isinstance(self.holder, CONTAINERS):
            del self.holder[self.key]
        else:
            delattr(self.holder, self.key)


def put_at_the_same_address(get, put, make, *args):
    """Drops what is somewhere and puts something new there, at the old address if that can be."""
    address = id(get())
    for _ in range(20):
        put(None)
        put(make(*args))
        if id(get()) == address:
            break


def one_of(options, where):
    """The chosen one as a list, which is empty if there is nothing to choose from."""
    return [options[where % len(options)]] if options else []


def holders(roots):
    """Everything that has places to write to, each once, in an order that copies share."""
    found: dict[int, Any] = {}

    def visit(x):
        if id(x) in found or isinstance(x, (*SEALED, nnx.Variable)) or not holds_data(x):
            return
        if isinstance(x, types.MethodType):
            x = x.__self__
        if isinstance(x, (Node, *CONTAINERS)) and type(x) is not defaultdict:
            if id(x) in found:
                return
            found[id(x)] = x
        for _, child in children(x):
            visit(child)

    for root in roots:
        visit(root)
    return list(found.values())


def places(roots, wanted=lambda value: True):
    """The places whose value is wanted, in an order that copies share."""
    return [
        Place(holder, key)
        for holder in holders(roots)
        for key, value in children(holder)
        if wanted(value)
    ]


def swap_places(found, where, n):
    """Swaps what two of the places hold."""
    for one in one_of(found, where):
        for other in one_of(found, where + n):
            first, second = one.get(), other.get()
            one.set(second)
            other.set(first)


def change_a_table(found, n):
    """Writes into the NumPy array of ``ArraySettings`` or a ``UserDict``."""
    table = found.table if type(found) is ArraySettings else found["table"]
    table[0] = table[0] % 7 + n


def nodes(roots):
    return [x for x in holders(roots) if isinstance(x, Node)]


def identities(roots, look=True):
    """Everything with an identity below the roots, each once, sealed objects opened."""
    found: dict[int, Any] = {}

    def visit(x):
        if isinstance(x, types.MethodType):
            x = x.__self__
        if not holds_data(x) or id(x) in found:
            return
        if has_identity(x) or isinstance(x, np.ndarray):
            found[id(x)] = x
        for _, child in inner(x, look):
            visit(child)

    for root in roots:
        visit(root)
    return list(found.values())


def inner(x, look):
    """What is inside of ``x``; streams are not looked at where that would wake them."""
    if isinstance(x, nnx.Rngs):
        return sorted(x.items()) if look else []
    return children(x) if not isinstance(x, (nnx.Variable, jax.Array, np.ndarray)) else []


def variables(roots):
    """The Variables that a program may write to."""
    found = {id(x): x for x in roots if isinstance(x, nnx.Variable)}
    for holder in holders(roots):
        for x in leaves_of(holder):
            if isinstance(x, nnx.Variable):
                found.setdefault(id(x), x)
    return list(found.values())


def leaves_of(holder):
    """What a holder holds, also in tuples and other things that cannot be written to."""
    for _, x in children(holder):
        if isinstance(x, (tuple, Box, defaultdict)):
            yield from leaves_of(x)
        else:
            yield x


def is_array(x):
    return isinstance(x, (jax.Array, np.ndarray))


def is_member(x):
    """Whether ``x`` may stand anywhere, also twice."""
    return isinstance(x, (nnx.Variable, nnx.Pytree))


def is_data_tuple(x):
    return isinstance(x, tuple) and any(map(is_member, x))


def plus(x, n):
    """Other numbers of the same shape and dtype, exact in float32."""
    return x if is_key(x) else jnp.asarray(x) + jnp.asarray(n, x.dtype)


# ---- accounts -----------------------------------------------------------------------------------


class Numbers:
    """An array to compare: dtype, shape and values, which may differ by rounding."""

    def __init__(self, x):
        self.dtype = str(x.dtype)
        self.values = np.array(jax.random.key_data(x) if is_key(x) else x)

    def __eq__(self, other):
        return (
            type(other) is Numbers
            and self.dtype == other.dtype
            and self.values.shape == other.values.shape
            and np.allclose(
                self.values.astype(np.float64), other.values.astype(np.float64), 2e-6, 1e-6
            )
        )

    __hash__ = None

    def __repr__(self):
        return f"{self.dtype}{list(self.values.shape)} {self.values.tolist()}"


def account(roots, known=(), look=True, arrays=Numbers, keeps_numpy=True):
    """Everything below named roots as a flat dict from path to text or ``Numbers``.

    Args:
      roots: a dict of anything.
      known: things that existed before; they are told apart by their numbers in this list, so that
        two accounts are equal only if the same old things stand in the same places.
      look: look into ``Rngs``, which wakes those that nobody used yet.
      arrays: what to make of an array.
      keeps_numpy: tell old NumPy arrays apart too.
    """
    numbers = {id(x): f"old {i}" for i, x in enumerate(known)}
    visited: set[int] = set()
    found: dict[str, Any] = {}

    def visit(path, x):
        if isinstance(x, types.MethodType) and isinstance(x.__self__, nnx.Pytree):
            found[path] = f"method {x.__func__.__name__}"
            visit(f"{path}.__self__", x.__self__)
        elif not holds_data(x):
            found[path] = static_text(x)
        elif is_array(x):
            found[path] = arrays(x)
            if keeps_numpy and id(x) in numbers and isinstance(x, np.ndarray):
                found[f"{path} (numpy)"] = numbers[id(x)]
        elif has_identity(x):
            number = numbers.setdefault(id(x), f"new {len(numbers) - len(known)}")
            found[path] = f"{number}: {type_text(type(x))}{order_text(x)}"
            if id(x) not in visited:
                visited.add(id(x))
                visit_inside(path, x)
        else:
            found[path] = f"{type_text(type(x))}{order_text(x)}"
            visit_inside(path, x)

    def visit_inside(path, x):
        if isinstance(x, nnx.Variable):
            metadata = x.get_metadata(exclude_required=True)
            found[f"{path} (metadata)"] = static_text(dict(sorted(metadata.items())))
            leaves, treedef = jax.tree.flatten(stored(x))
            found[f"{path} (value)"] = str(treedef)
            for i, leaf in enumerate(leaves):
                found[f"{path}.value {i}"] = arrays(leaf)
        for key, child in methods_last(inner(x, look)):
            if not (isinstance(x, nnx.Optimizer) and key == "transformation"):
                visit(f"{path}.{key}", child)

    for name, root in roots.items():
        visit(name, root)
    return found


def stored(variable):
    """What a Variable holds, before hooks."""
    return variable.raw_value[...] if variable.ref else variable.raw_value


def methods_last(inside):
    """A method's owner is shown where it really stands."""
    return sorted(inside, key=lambda item: isinstance(item[1], types.MethodType))


def order_text(x):
    return f" of {list(x)}" if isinstance(x, (dict, nnx.Dict)) else ""


def type_text(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def static_text(x):
    """A static value as text: exact types, containers and functions by what is in them."""
    if isinstance(x, (list, tuple, set)):
        return f"{type(x).__name__}({', '.join(map(static_text, x))})"
    if isinstance(x, dict):
        return f"dict({', '.join(f'{static_text(k)}: {static_text(v)}' for k, v in x.items())})"
    if isinstance(x, types.FunctionType):
        cells = [static_text(cell.cell_contents) for cell in x.__closure__ or ()]
        return f"{x.__qualname__} {cells} {namespace_text(x)}"
    if isinstance(x, functools.partial):
        return f"partial({', '.join(map(static_text, (x.func, x.args, x.keywords)))})"
    if type(x) is Config:  # with what was set beside its fields
        return f"Config {vars(x)}"
    return x.__qualname__ if isinstance(x, type) else f"{type(x).__name__} {x!r}"


def namespace_text(function):
    """The globals that a function of a notebook reads."""
    namespace = function.__globals__
    if namespace.get("__name__") != NOTEBOOK:
        return ""
    return [(name, static_text(namespace[name])) for name in function.__code__.co_names]


# ---- notebooks ----------------------------------------------------------------------------------

NOTEBOOK = "a notebook"


def act(x):
    return helper(x) * rate  # noqa: F821 - names of the notebook


def helper(x):
    return x + shift  # noqa: F821


def other_helper(x):
    return x - shift  # noqa: F821


def cell(template, namespace):
    """A function as a cell of a notebook defines it: the same code, new each time it is run."""
    function = types.FunctionType(template.__code__, namespace, template.__name__)
    function.__qualname__ = template.__qualname__
    namespace[template.__name__.removeprefix("other_")] = function
    return function


def notebook(n):
    """A namespace in which ``act``, its helper and the numbers they read are defined."""
    namespace: dict[str, Any] = {"__name__": NOTEBOOK, "rate": n, "shift": n + 1}
    cell(helper, namespace)
    cell(act, namespace)
    return namespace


def is_notebook_function(x):
    return isinstance(x, types.FunctionType) and x.__globals__.get("__name__") == NOTEBOOK


# ---- ingredients --------------------------------------------------------------------------------


def array(n, size=2):
    return jnp.arange(size, dtype=jnp.float32) + n


def node(n=1):
    """A new object with a Variable and an array."""
    new = Node()
    new.v = nnx.Param(array(n))
    new.u = array(10 * n)
    return new


def trained_with(transformation):
    def add(holder, n):
        holder.trained = Trained(n)
        holder.optimizer = nnx.Optimizer(holder.trained, transformation(), wrt=nnx.Param)

    return add


def at_free_name(make):
    """Puts something under a name that the holder does not use yet."""

    def add(holder, n):
        free = [name for name in NAMES[n % 8 :] + NAMES if name not in vars(holder)]
        setattr(holder, free[0] if free else f"more{n}", make(holder, n))

    return add


def cycle(holder, n):
    child = node(n)
    child.back = holder
    return child


def method_of_another(holder, n):
    child = node(n)
    child.own = child.double
    return child.double


def doubled(variable, value):
    return value * 2


def halved(variable, value):
    return value / 2


def switch(holder, n):
    holder.deterministic = bool(n % 2)


INGREDIENTS = {
    name: at_free_name(make)
    for name, make in {
        "jax array": lambda holder, n: array(n),
        "numpy array": lambda holder, n: np.float32([n, n + 1]),
        "whole numbers": lambda holder, n: jnp.arange(2) + n,
        "param": lambda holder, n: nnx.Param(array(n)),
        "statistic": lambda holder, n: nnx.BatchStat(array(n, 3)),
        "count": lambda holder, n: Count(jnp.int32(n), role=n),
        "dict in a Variable": lambda holder, n: nnx.Cache({"k": array(n), "l": jnp.int32(n)}),
        "list in a Variable": lambda holder, n: nnx.Cache([array(n), array(n + 1)]),
        "listed metadata": lambda holder, n: nnx.Param(array(n), axes=[n]),
        "hooked": lambda holder, n: nnx.Param(array(n), on_get_value=doubled, on_set_value=halved),
        "ref": lambda holder, n: nnx.Param(array(n), ref=True),
        "child": lambda holder, n: node(n),
        "quantized child": lambda holder, n: grown(Quantized(), n),
        "wayward child": lambda holder, n: grown(Wayward(), n),
        "wilful child": lambda holder, n: grown(Wilful(), n),
        "list": lambda holder, n: [node(n), nnx.Param(array(n)), n],
        "list of arrays": lambda holder, n: [array(n), np.float32([n, n])],
        "dict": lambda holder, n: {"q": node(n), "p": array(n), "static": n},
        "tuple": lambda holder, n: (node(n), nnx.Param(array(n)), node(n + 1)),
        "tuple with a number": lambda holder, n: (node(n), 0, n),
        "named tuple": lambda holder, n: Pair(node(n), nnx.Param(array(n))),
        "List": lambda holder, n: nnx.List([node(n), nnx.Param(array(n)), n]),
        "List of tuples": lambda holder, n: nnx.List([(node(n), 0, n), (nnx.Param(array(n)),)]),
        "Dict": lambda holder, n: nnx.Dict(q=node(n), p=array(n), static=n),
        "box": lambda holder, n: Box(nnx.Param(array(n)), "box"),
        "State": lambda holder, n: nnx.State({"s": {"t": nnx.Param(array(n))}}),
        "cycle": cycle,
        "shared": lambda holder, n: holder,
        "unused Rngs": lambda holder, n: nnx.Rngs(n, noise=n + 1),
        "stream": lambda holder, n: nnx.Rngs(n).default,
        "number": lambda holder, n: n,
        "numbers": lambda holder, n: [n, 2 * n],
        "entries": lambda holder, n: {"size": n},
        "config": lambda holder, n: Config(n),
        "settings": lambda holder, n: ArraySettings(n),
        "options": lambda holder, n: HashedOptions(n),
        "user dict": lambda holder, n: user_dict(n),
        "defaultdict": lambda holder, n: defaultdict(int, z=node(n), a=nnx.Param(array(n))),
        "function": lambda holder, n: notebook(n)["act"],
        "partial": lambda holder, n: functools.partial(max, n),
        "own method": lambda holder, n: holder.double,
        "method": method_of_another,
    }.items()
}
INGREDIENTS["switch"] = switch
INGREDIENTS["adam"] = trained_with(lambda: optax.adam(0.25))
INGREDIENTS["injected rate"] = trained_with(
    lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
)


def with_the_same(holder, value):
    """A node that has a static value in common with its holder."""
    child = Node()
    child.same = child.again = holder.same = value
    return child


# Not among the others: what two arguments share is no longer shared inside.
SHARED_STATICS = {
    "shared config": at_free_name(lambda holder, n: with_the_same(holder, Config(n))),
    "shared numbers": at_free_name(lambda holder, n: with_the_same(holder, [n] if n % 2 else [])),
}


def grown(empty, n):
    empty.v, empty.u = nnx.Param(array(n)), array(n + 3)
    return empty


class World:
    """Two root objects and what is below them, most of it on the left."""

    def __init__(self, recipe):
        self.roots: dict[str, Any] = {"left": Node(), "right": Node()}
        self.results: list[Any] = []  # objects that the last call returned
        for name, where, n in recipe:
            roots = self.all() if where % 4 == 0 else [self.roots["left"]]
            for holder in one_of(nodes(roots), where):
                (INGREDIENTS | SHARED_STATICS)[name](holder, n)

    def all(self):
        return list(self.roots.values())
