"""Which attributes are data and which are static: by type, by mark, by annotation, by dataclass."""

import collections
import dataclasses
import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import HiddenDataWarning, LostVariableWarning, StaticDataError
from linnet.nnx.pytreelib.attributes import sort_attributes
from tests.models import Bag, Pair, param

ANOTHER_NAME = nnx.Data


def leaves(tree):
    return jax.tree.leaves(tree)


def data_names(obj):
    return sort_attributes(obj).names


DATA = {
    "Variable": param,
    "module": Bag,
    "empty nnx.List": nnx.List,
    "empty nnx.Dict": nnx.Dict,
    "jax array": lambda: jnp.ones(2),
    "numpy array": lambda: np.ones(2),
    "random key": lambda: jax.random.key(0),
    "list of Variables": lambda: [param()],
    "dict of arrays": lambda: {"a": np.ones(2)},
    "tuple of modules": lambda: (Bag(),),
    "NamedTuple": lambda: Pair(1, param()),
    "deep": lambda: [{"a": (1, [param()])}],
    "OrderedDict": lambda: OrderedDict(a=param()),
    "State": lambda: nnx.State({"a": param()}),
    "pytree of plain numbers": lambda: OrderedDict(a=1),
    "method of another module": lambda: Bag().method,
}
STATIC = {
    "int": lambda: 1,
    "bool": lambda: True,
    "str": lambda: "relu",
    "None": lambda: None,
    "function": lambda: jnp.tanh,
    "partial": lambda: functools.partial(jnp.sum, axis=0),
    "type": lambda: jnp.float32,
    "dtype": lambda: np.dtype("int8"),
    "numpy scalar": lambda: np.float32(1),
    "abstract array": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "empty list": list,
    "list of numbers": lambda: [1, 2.0],
    "nested": lambda: {"a": [(1, 2), {"b": None}]},
    "set": lambda: {1, 2},
    "pytree without leaves": OrderedDict,
    "method of a plain object": lambda: [].append,
}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_data_is_recognised_by_itself(make):
    value = make()
    assert data_names(Bag(x=value, other=1)) == ("x",)
    assert nnx.has_data(value) or isinstance(value, OrderedDict)


@pytest.mark.parametrize("make", STATIC.values(), ids=STATIC)
def test_everything_else_is_static(make):
    value = make()
    assert data_names(Bag(x=value, other=1)) == ()
    assert nnx.has_data(value) == []
    assert not nnx.is_data(value)
    assert leaves(Bag(x=value)) == []


def test_is_data_asks_for_the_value_itself_and_has_data_for_what_is_inside():
    p, q = param(1), param(2)
    assert [nnx.is_data(x) for x in (p, Bag(), np.ones(1), [p], (p,))] == [True] * 3 + [False] * 2
    assert nnx.has_data([p, {"a": (1, q)}]) == [p, q]
    assert nnx.has_data("text") == []


def test_sorting_follows_a_list_that_is_filled_later():
    bag = Bag(layers=[], table={})
    assert data_names(bag) == ()
    bag.layers.append(param(3))
    assert data_names(bag) == ("layers",)
    bag.table["a"] = {"b": param(4)}
    assert [float(x) for x in leaves(bag)] == [3, 4]
    bag.layers.clear()
    assert data_names(bag) == ("table",)


def test_registered_data_types_are_leaves():
    @nnx.register_data_type
    class Handle:
        pass

    handle = Handle()
    assert nnx.is_data(handle)
    assert leaves(Bag(h=handle, hs=[handle])) == [handle, handle]
    assert nnx.state(Bag(h=handle))["h"] is handle


# ---- marks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, "text", None, [1, 2], {"a": 1}])
def test_data_marks_an_attribute_whatever_its_value(value):
    bag = Bag(x=nnx.data(value))
    assert bag.x == value
    assert data_names(bag) == ("x",)
    assert leaves(bag) == leaves(value)


def test_a_data_mark_outlives_assignments_and_goes_with_the_attribute():
    bag = Bag(x=nnx.data(1))
    bag.x = 2
    assert leaves(bag) == [2]
    del bag.x
    bag.x = 3
    assert leaves(bag) == []


@pytest.mark.parametrize("value", [1, "text", None, [1, 2], {"a": 1}, []])
@pytest.mark.parametrize("copy", [nnx.clone, lambda m: nnx.merge(*nnx.split(m))])
def test_copies_keep_data_marks(value, copy):
    bag = Bag(x=nnx.data(value), y=1)
    copied = copy(bag)
    assert data_names(copied) == ("x",)
    assert copied.x == value
    assert nnx.graphdef(copied) == nnx.graphdef(bag)
    assert jax.tree.structure(copied) == jax.tree.structure(bag)


def test_static_marks_refuse_data_until_the_attribute_is_deleted_or_marked_anew():
    bag = Bag(x=nnx.static(1))
    bag.x = 2
    with pytest.raises(
        StaticDataError, match=r"^Bag\.x is static, but got data: ArrayImpl\.\nFix: "
    ):
        bag.x = jnp.ones(2)
    assert bag.x == 2
    bag.x = nnx.data(jnp.ones(2))
    assert len(leaves(bag)) == 1
    bag.y = nnx.static(1)
    del bag.y
    bag.y = jnp.ones(2)
    assert len(leaves(bag)) == 2


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda: jnp.ones(2), "ArrayImpl"),
        (lambda: np.ones(2), "ndarray"),
        (param, "Param"),
        (Bag, "Bag"),
        (lambda: [1, param(), np.ones(2)], "list with Param, ndarray"),
        (lambda: {"a": Bag()}, "dict with Bag"),
    ],
)
def test_static_around_data_is_refused_with_name_and_types(value, found):
    with pytest.raises(ValueError) as error:
        Bag(x=nnx.static(value()))
    assert str(error.value) == (
        f"Bag.x is static, but got data: {found}.\n"
        "Fix: drop the static mark, or assign nnx.data(...), or annotate it `x: nnx.Data[...]`."
    )


@pytest.mark.parametrize("use", [nnx.split, leaves, nnx.check_pytree])
def test_a_static_list_that_was_filled_with_data_is_refused_when_used(use):
    bag = Bag(x=nnx.static([]))
    bag.x.append(param())
    with pytest.raises(StaticDataError, match=r"Bag\.x is static, but got data: list with Param\."):
        use(bag)


def test_two_objects_marked_in_another_order_have_one_structure():
    first, second = Bag(a=nnx.static(1), b=nnx.static(2)), Bag(b=nnx.static(2), a=nnx.static(1))
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert jax.tree.structure(first) == jax.tree.structure(second)


@pytest.mark.parametrize("inside", [[nnx.data(1)], (1, nnx.static(2)), {"a": nnx.data(1)}])
def test_marks_inside_a_plain_container_are_refused(inside):
    kind = type(inside).__name__
    with pytest.raises(ValueError, match=rf"^Bag\.x got .* inside a {kind}\.\nFix: mark the whole"):
        Bag(x=inside)


@pytest.mark.parametrize("mark", [nnx.data, nnx.static])
def test_a_mark_without_a_value_is_for_dataclass_fields_only(mark):
    with pytest.raises(
        TypeError, match=r"^Bag\.x was assigned .* without a value\.\nFix: self\.x ="
    ):
        Bag(x=mark())


# ---- annotations --------------------------------------------------------------------------------


class Annotated(nnx.Module):
    number: nnx.Data[int]
    maybe: nnx.Data[int] | None
    quoted: "nnx.Data[int]"
    renamed: "ANOTHER_NAME[int]"
    unknown: "nnx.Data[NotDefinedAnywhere]"  # noqa: F821
    fixed: nnx.Static[Any]
    fixed_quoted: "nnx.Static[Any]"
    plain: int

    def __init__(self):
        self.number = self.maybe = self.quoted = self.renamed = self.unknown = 1
        self.fixed = self.fixed_quoted = self.plain = 2


def test_annotations_declare_data_and_static():
    # One name that cannot be found makes the whole class read its annotations as text.
    assert data_names(Annotated()) == ("maybe", "number", "quoted", "unknown")


@pytest.mark.parametrize("name", ["fixed", "fixed_quoted"])
def test_annotated_static_attributes_refuse_data(name):
    with pytest.raises(StaticDataError, match=rf"Annotated\.{name} is static, but got data: Param"):
        setattr(Annotated(), name, param())


def test_annotations_of_a_module_with_postponed_evaluation():
    source = """
from __future__ import annotations
from linnet.nnx import Data as D, Static, Module
class Late(Module):
    a: D[int]
    b: Static[int]
    c: int | None
"""
    module = types.ModuleType("postponed")
    sys.modules["postponed"] = module
    try:
        exec(source, vars(module))
        late = module.Late()
        late.a = late.b = late.c = 1
        assert data_names(late) == ("a",)
        with pytest.raises(StaticDataError, match=r"Late\.b is static"):
            late.b = jnp.ones(2)
    finally:
        del sys.modules["postponed"]


def test_annotations_are_inherited_and_can_be_overridden():
    class Base(nnx.Module):
        a: nnx.Data[int]
        b: nnx.Data[int]

    class Derived(Base):
        b: nnx.Static[int]

    derived = Derived()
    derived.a = derived.b = 1
    assert data_names(derived) == ("a",)


def test_a_module_may_come_where_none_was_annotated_as_data():
    class Block(nnx.Module):
        skip: nnx.Data[Bag | None]

        def __init__(self):
            self.skip = None

    block = Block()
    assert leaves(block) == []
    block.skip = Bag(w=param(2))
    assert [float(x) for x in leaves(block)] == [2]


# ---- strict classes ------------------------------------------------------------------------------


class Strict(Bag, pytree="strict"):
    declared: nnx.Data[Any]


class StillStrict(Strict):
    pass


@pytest.mark.parametrize("cls", [Strict, StillStrict])
@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(2), [param()], {"a": Bag()}])
def test_a_strict_class_wants_arrays_and_containers_declared(cls, value):
    with pytest.raises(StaticDataError) as error:
        cls(x=value)
    assert str(error.value).startswith(
        f"{cls.__name__}.x holds data ({type(value).__name__}) without saying so, and the class "
        "is strict.\nFix: self.x = nnx.data(...), annotate it `x: nnx.Data[...]`"
    )
    assert len(leaves(cls(x=nnx.data(value), declared=value))) == 2 * len(leaves(value))


def test_a_strict_class_takes_variables_modules_and_static_values():
    strict = Strict(w=param(1), inner=Bag(), n=3, dims=[1])
    assert leaves(nnx.clone(strict)) == [1]
    assert leaves(jax.tree.map(lambda x: x + 1, strict)) == [2]


# ---- dataclasses --------------------------------------------------------------------------------


@nnx.dataclass
class Layer(nnx.Module):
    w: nnx.Param
    size: int
    scale: float = 2.0
    counter: int = nnx.data(default=0)
    dims: list = nnx.static(default_factory=list)
    names: list = nnx.static(["a"])


def test_dataclass_fields_are_sorted_like_attributes():
    layer = Layer(param(1), 3)
    assert (layer.size, layer.scale, layer.counter) == (3, 2.0, 0)
    assert data_names(layer) == ("counter", "w")
    assert [float(x) for x in leaves(layer)] == [0, 1]


def test_mutable_defaults_are_not_shared():
    first, second = Layer(param(), 1), Layer(param(), 1)
    first.names.append("b")
    first.dims.append(1)
    assert (second.names, second.dims) == (["a"], [])


def test_dataclasses_compare_by_identity_unless_asked():
    p = param()
    assert Layer(p, 1) != Layer(p, 1)
    assert len({Layer(p, 1), Layer(p, 1)}) == 2

    @nnx.dataclass(eq=True)
    class Point(nnx.Pytree):
        x: int

    assert Point(1) == Point(1)
    assert Point(1) != Point(2)


def test_dataclass_inheritance_keyword_only_fields_and_post_init():
    @nnx.dataclass
    class Base(nnx.Module):
        w: nnx.Param
        frozen: Any = nnx.static(default=None, kw_only=True)

    @nnx.dataclass(kw_only=True)
    class Derived(Base):
        depth: int
        axis: nnx.Data[int] = 0

        def __post_init__(self):
            self.doubled = self.depth * 2

    derived = Derived(param(5), depth=2, frozen="x")
    assert (derived.doubled, derived.frozen, derived.axis) == (4, "x", 0)
    assert data_names(derived) == ("axis", "w")
    with pytest.raises(TypeError):
        Derived(param(5), 2)
    with pytest.raises(StaticDataError, match=r"Derived\.frozen is static"):
        Derived(param(5), depth=2, frozen=param())


def test_options_of_the_field_are_passed_on():
    @nnx.dataclass
    class Hidden(nnx.Module):
        x: int = nnx.data(default_factory=lambda: 1, init=False, metadata={"note": "mine"})

    assert leaves(Hidden()) == [1]
    (field,) = dataclasses.fields(Hidden)
    assert (field.metadata["note"], field.init) == ("mine", False)


@pytest.mark.parametrize("option", ["slots", "weakref_slot"])
def test_slots_are_refused(option):
    with pytest.raises(TypeError, match=r"^nnx\.dataclass cannot use slots.*\nFix: leave out"):
        nnx.dataclass(type("Slotted", (nnx.Module,), {}), **{option: True})


def test_plain_dataclasses_and_generic_classes_work_too():
    T = TypeVar("T")

    @dataclasses.dataclass(eq=False)
    class Typed(nnx.Module, Generic[T]):
        w: nnx.Param
        label: T

    typed = jax.tree.map(lambda x: x + 1, Typed(param(1), "a"))
    assert (float(typed.w.value), typed.label) == (2, "a")


# ---- what the sorting remembers -----------------------------------------------------------------


class Opaque:
    pass


def closing_over_itself():
    bag = Bag(w=param())
    bag.act = lambda x: x * bag.w
    return bag


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bag(static=Opaque()),
        lambda: Bag(static=(Opaque(),)),
        closing_over_itself,
    ],
    ids=["object", "tuple", "closure over the model"],
)
def test_a_dropped_model_and_its_static_values_are_freed(make):
    bag = make()
    nnx.split(bag)
    leaves(bag)
    static = vars(bag).get("static", bag)
    watched = weakref.ref(static[0] if isinstance(static, tuple) else static)
    del bag, static
    gc.collect()
    assert watched() is None


def test_a_copy_keeps_its_own_function_when_another_object_has_an_equal_one():
    def recorder():
        log = []
        return lambda x: log.append(x) or log

    first, second = Bag(f=recorder()), Bag(f=recorder())
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert nnx.clone(second).f is second.f
    assert jax.tree.map(lambda x: x, second).f is second.f


def test_a_class_with_ever_new_attributes_keeps_a_bounded_memory():
    class Growing(nnx.Module):
        pass

    growing = Growing()
    for i in range(600):
        setattr(growing, f"a{i % 300}", i)
        sort_attributes(growing)
    assert len(Growing._pytree_layouts) <= 256


@pytest.mark.parametrize(
    "make",
    [
        lambda x: collections.deque([x]),
        lambda x: collections.UserList([x]),
        lambda x: type("Layers", (list,), {})([x]),
        lambda x: type("Table", (dict,), {})(a=x),
    ],
    ids=["deque", "UserList", "list subclass", "dict subclass"],
)
def test_containers_that_modules_do_not_look_into_are_announced(make):
    class Holder(nnx.Module):
        pass

    holder, value = Holder(), make(nnx.Param(jnp.ones(1)))
    message = (
        rf"Holder\.layers is a {type(value).__name__} with Param inside\. .*nothing in it is "
        r"trained, saved or updated\.\nFix: use a list"
    )
    with pytest.warns(HiddenDataWarning, match=message):
        holder.layers = value
    holder.layers = nnx.static(value)
    holder.empty = make(None)


def test_a_set_of_modules_is_announced():
    class Holder(nnx.Module):
        pass

    with pytest.warns(HiddenDataWarning, match=r"Holder\.seen is a set with Holder inside"):
        Holder().seen = {Holder()}


def test_an_object_that_is_no_module_and_holds_one_is_announced():
    class Helper:  # its author forgot nnx.Module
        def __init__(self, layer=None):
            self.layer, self.size = layer, 3

    class Holder(nnx.Module):
        pass

    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for value in (Helper(layer), types.SimpleNamespace(layer=layer, size=3)):
        name = type(value).__name__
        holder = Holder()
        with pytest.warns(HiddenDataWarning) as caught:
            holder.helper = value
        assert str(caught[0].message) == (
            f"Holder.helper is a {name} with Linear inside. Modules do not look into it, so "
            "nothing in it is trained, saved or updated.\n"
            f"Fix: let {name} derive from nnx.Module; if this is meant, say nnx.static(...)."
        )
        holder.helper = nnx.static(value)
    holder = Holder()
    for value in (Helper(), Helper, nnx.Linear, types.SimpleNamespace(kind=nnx.Linear), optax.adam):
        holder.helper = value


@pytest.mark.parametrize(
    ("hold", "found"),
    [
        (lambda holder: functools.partial(holder.scaled, k=2), "partial with Holder.scaled"),
        (lambda holder: functools.partial(max, holder.w, key=holder), "partial with Param"),
        (lambda holder: defaultdict(holder.scaled), "defaultdict with Holder.scaled"),
    ],
)
def test_what_a_copy_would_go_on_calling_on_the_original_is_announced(hold, found):
    class Holder(nnx.Module):
        def __init__(self):
            self.w = param()
            self.sums = functools.partial(jnp.sum, axis=0)
            self.lists = defaultdict(list)

        def scaled(self, k=1):
            return self.w * k

    holder = Holder()
    with pytest.warns(HiddenDataWarning) as caught:
        holder.act = hold(holder)
    local = f"{Holder.__qualname__.removesuffix('Holder')}"
    assert str(caught[0].message).replace(local, "") == (
        f"Holder.act is a {found} inside. Modules do not look into it, so nothing in it is "
        "trained, saved or updated.\n"
        "Fix: use a list, a tuple, a dict or nnx.List, and a method in place of a partial; if "
        "this is meant, say nnx.static(...)."
    )
    holder.act = nnx.static(hold(holder)) if "partial" in found else None


def test_an_array_in_place_of_a_variable_is_announced():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    message = (
        r"Linear\.bias was a Param and becomes a plain array, .*\n"
        r"Fix: write the value, as in `\.bias\[\.\.\.\] = value`; or assign nnx\.Param\(value\)"
    )
    with pytest.warns(LostVariableWarning, match=message):
        layer.bias = jnp.ones(3)
    layer.bias = jnp.zeros(3)
    layer.kernel = nnx.Param(jnp.ones((2, 3)))
    layer.kernel = None


def test_pytrees_without_arrays_may_be_static():
    bag = Bag(names=nnx.static(OrderedDict(a=1)))
    assert data_names(bag) == () and nnx.clone(bag).names == {"a": 1}
    with pytest.raises(
        StaticDataError, match=r"Bag\.names is static, but got data: OrderedDict wi"
    ):
        bag.names = OrderedDict(a=jnp.ones(1))
