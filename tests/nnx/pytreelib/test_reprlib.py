"""How things print: the texts of the seeds, and of Flax where the seeds show none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.nnx.pytreelib.printing import Representable, array_size, count_variables, size_text
from tests.models import Count, Pair


class Empty(nnx.Module):
    pass


class Linear(nnx.Module):
    """A stand-in for nnx.Linear with its attributes, in its order."""

    def __init__(self, din, dout):
        self.kernel = nnx.Param(jnp.zeros((din, dout)))
        self.bias = nnx.Param(jnp.zeros((dout,)))
        self.in_features, self.out_features = din, dout
        self.use_bias, self.dtype, self.param_dtype = True, None, jnp.float32
        self.kernel_init = make_init()


def make_init():
    def init():
        pass

    return init


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def module(**attributes):
    result = Empty()
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


# ---- the seeds ----------------------------------------------------------------------------------


def test_an_abstract_layer_prints_as_the_first_seed_shows():
    layer = jax.eval_shape(lambda: Linear(8190, 8190))
    assert (
        without_addresses(str(layer))
        == """\
Linear( # Param: 67,084,290 (268.3 MB)
  bias=Param( # 8,190 (32.8 KB)
    value=ShapeDtypeStruct(shape=(8190,), dtype=float32)
  ),
  kernel=Param( # 67,076,100 (268.3 MB)
    value=ShapeDtypeStruct(shape=(8190, 8190), dtype=float32)
  ),
  dtype=None,
  in_features=8190,
  kernel_init=<function make_init.<locals>.init at 0x>,
  out_features=8190,
  param_dtype=float32,
  use_bias=True
)"""
    )


def test_shardings_in_place_of_arrays():
    mesh = jax.make_mesh((1,), ("model",))
    spec = jax.sharding.PartitionSpec(None, "model")
    shardings = jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, spec), Linear(2, 2))
    assert repr(shardings.kernel) == f"Param(\n  value={shardings.kernel.value!r}\n)"
    assert "(None, 'model')" in repr(shardings)


def test_rngs():
    rngs = nnx.Rngs(0)
    for _ in range(3):
        rngs()
    assert (
        str(rngs)
        == """\
Rngs( # RngState: 2 (12 B)
  default=RngStream( # RngState: 2 (12 B)
    tag='default',
    key=RngKey( # 1 (8 B)
      value=Array((), dtype=key<fry>) overlaying:
      [0 0],
      tag='default'
    ),
    count=RngCount( # 1 (4 B)
      value=Array(3, dtype=uint32),
      tag='default'
    )
  )
)"""
    )


def test_hijax_variables():
    with nnx.var_defaults(hijax=True):
        count = Count(jnp.zeros((), jnp.int32))  # a ref keeps no weak type from JAX 0.11 on
        model = module(din=2, w=nnx.Param(jnp.ones((2, 5))), count=count)
    assert (
        str(model)
        == """\
Empty( # Count: 1 (4 B), Param: 10 (40 B), Total: 11 (44 B)
  din=2,
  w=Param( # 10 (40 B)
    value=Array(shape=(2, 5), dtype=dtype('float32')),
    hijax=True
  ),
  count=Count( # 1 (4 B)
    value=Array(0, dtype=int32),
    hijax=True
  )
)"""
    )


def test_abstract_rngs_and_plain_arrays():
    model = nnx.eval_shape(lambda: module(rngs=nnx.Rngs(0), array=jnp.zeros((2, 2))))
    assert (
        str(model)
        == """\
Empty( # RngState: 2 (12 B)
  array=ShapeDtypeStruct(shape=(2, 2), dtype=float32),
  rngs=Rngs( # RngState: 2 (12 B)
    default=RngStream( # RngState: 2 (12 B)
      count=RngCount( # 1 (4 B)
        value=ShapeDtypeStruct(shape=(), dtype=uint32),
        tag='default'
      ),
      key=RngKey( # 1 (8 B)
        value=ShapeDtypeStruct(shape=(), dtype=key<fry>),
        tag='default'
      ),
      tag='default'
    )
  )
)"""
    )


# ---- Variables ----------------------------------------------------------------------------------

ONES = "Array([1., 1.], dtype=float32)"
VARIABLES = {
    "array": (lambda: nnx.Param(jnp.ones(2)), f"Param( # 2 (8 B)\n  value={ONES}\n)"),
    "number": (lambda: nnx.Param(1.5), "Param(\n  value=1.5\n)"),
    "None": (lambda: nnx.Variable(None), "Variable(\n  value=None\n)"),
    "text": (lambda: nnx.Param("text"), "Param(\n  value='text'\n)"),
    "bool": (
        lambda: nnx.Variable(jnp.zeros((), bool)),
        "Variable( # 1 (1 B)\n  value=Array(False, dtype=bool)\n)",
    ),
    "tuple": (lambda: nnx.Param((1, 2)), "Param(\n  value=(1, 2)\n)"),
    "sown": (
        lambda: nnx.Intermediate((jnp.ones(2),)),
        f"Intermediate( # 2 (8 B)\n  value=({ONES},)\n)",
    ),
    "dict": (
        lambda: nnx.Param({"a": jnp.ones(2), "b": [jnp.ones(2)]}),
        f"Param( # 4 (16 B)\n  value={{'a': {ONES}, 'b': [{ONES}]}}\n)",
    ),
    "metadata": (
        lambda: nnx.Param(jnp.ones(2), foo=3, dtype=jnp.float16, cls=Count),
        f"Param( # 2 (8 B)\n  value={ONES},\n  foo=3,\n  dtype=float16,\n  cls=Count\n)",
    ),
    "no elements": (
        lambda: nnx.Param(jnp.zeros((0,))),
        "Param(\n  value=Array([], shape=(0,), dtype=float32)\n)",
    ),
    "ref": (
        lambda: nnx.Variable(jnp.ones(()), ref=True),
        "Variable( # 1 (4 B)\n  value=Array(1., dtype=float32),\n  ref=True\n)",
    ),
}


@pytest.mark.parametrize(("make", "text"), VARIABLES.values(), ids=VARIABLES)
def test_variables(make, text):
    variable = make()
    assert repr(variable) == text
    assert str(variable) == text
    assert f"{variable}" == text


# ---- modules and containers ---------------------------------------------------------------------

P = "Param(\n    value=1.0\n  )"
ATTRIBUTES = {
    "static values": (
        lambda: {"a": 1, "b": "x\ny", "c": [1, 2], "d": {"k": (1,)}, "e": jnp.float32, "f": None},
        "a=1,\n  b='x\\ny',\n  c=[1, 2],\n  d={'k': (1,)},\n  e=float32,\n  f=None",
    ),
    "arrays": (
        lambda: {"a": jnp.ones((2, 2)), "b": np.ones(3), "c": jnp.array(2), "d": np.array(3)},
        "a=Array(shape=(2, 2), dtype=dtype('float32')),\n"
        "  b=Array(shape=(3,), dtype=dtype('float64')),\n"
        "  c=Array(2, dtype=int32, weak_type=True),\n  d=array(3)",
    ),
    "arrays in containers": (
        lambda: {"a": {"k": jnp.ones(2), "n": 1}, "b": (jnp.ones(2),), "c": [jnp.ones(2), 2]},
        "a={'k': Array(shape=(2,), dtype=dtype('float32')), 'n': 1},\n"
        "  b=(Array(shape=(2,), dtype=dtype('float32')),),\n"
        "  c=[Array(shape=(2,), dtype=dtype('float32')), 2]",
    ),
    "modules in containers": (
        lambda: {"a": [Empty()], "b": nnx.List([]), "c": nnx.Dict(), "d": nnx.State({})},
        "a=[Empty()],\n  b=List([]),\n  c=Dict({}),\n  d=State({})",
    ),
    "a list": (
        lambda: {"a": [1, nnx.Param(1.0)]},
        "a=[\n    1,\n    Param(\n      value=1.0\n    )\n  ]",
    ),
    "a tuple of one": (
        lambda: {"a": (nnx.Param(1.0),)},
        "a=(\n    Param(\n      value=1.0\n    ),\n  )",
    ),
    "a named tuple": (
        lambda: {"a": Pair(nnx.Param(1.0), 2)},
        f"a=Pair(left={P}, right=2)",
    ),
    "List": (
        lambda: {"a": nnx.List([1, nnx.Param(1.0)])},
        "a=List([\n    1,\n    Param(\n      value=1.0\n    )\n  ])",
    ),
    "Dict": (
        lambda: {"a": nnx.Dict(k=1, p=nnx.Param(1.0))},
        "a=Dict({\n    'k': 1,\n    'p': Param(\n      value=1.0\n    )\n  })",
    ),
}


@pytest.mark.parametrize(("attributes", "text"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes(attributes, text):
    assert repr(module(**attributes())) == f"Empty(\n  {text}\n)"


def test_nothing_inside():
    assert repr(Empty()) == "Empty()"
    assert repr(nnx.state(Empty())) == "State({})"


def test_a_cycle_and_a_shared_variable():
    p = nnx.Param(1.0)
    model = module(a=p, b=p)
    model.me = [model]
    assert repr(model) == f"Empty(\n  a={P},\n  b={P},\n  me=[Empty(...)]\n)"


def test_states_show_arrays_in_full():
    state = nnx.state(module(blocks=[module(w=nnx.Param(jnp.ones(2)))], x=jnp.ones(2)))
    assert (
        repr(state)
        == f"""\
State({{
  'blocks': {{
    0: {{
      'w': Param( # 2 (8 B)
        value={ONES}
      )
    }}
  }},
  'x': {ONES}
}})"""
    )
    assert (
        repr(state.flat_state())
        == f"""\
FlatState([
  (('blocks', 0, 'w'), Param( # 2 (8 B)
    value={ONES}
  )),
  (('x',), {ONES})
])"""
    )


def test_a_tracer_prints_as_such():
    texts = []

    @jax.jit
    def look(model):
        texts.append(repr(model))

    look(module(w=nnx.Param(jnp.ones(2))))
    assert re.fullmatch(
        r"Empty\( # Param: 2 \(8 B\)\n  w=Param\( # 2 \(8 B\)\n    value=\w+[<(]float32\[2\][>)]\n"
        r"  \)\n\)",
        texts[0],
    )


# ---- counts -------------------------------------------------------------------------------------


def test_counts_by_kind_each_variable_once():
    p = nnx.Param(jnp.ones(3))
    model = module(a=p, b=[p, nnx.BatchStat(jnp.ones(2, jnp.bfloat16))], c=jnp.ones(9))
    assert str(count_variables(model)) == "Param: 3 (12 B), BatchStat: 2 (4 B), Total: 5 (16 B)"
    assert repr(model).startswith("Empty( # Param: 3 (12 B), BatchStat: 2 (4 B), Total: 5 (16 B)\n")
    assert str(count_variables(module(a=nnx.Param(1.0)))) == ""


@pytest.mark.parametrize(
    ("size", "nbytes", "text"),
    [
        (0, 0, "0 (0 B)"),
        (999, 999, "999 (999 B)"),
        (999, 3996, "999 (4.0 KB)"),
        (8190, 32760, "8,190 (32.8 KB)"),
        (10**6, 4 * 10**6, "1,000,000 (4.0 MB)"),
        (10**9, 4 * 10**9, "1,000,000,000 (4.0 GB)"),
        (10**12, 4 * 10**12, "1,000,000,000,000 (4.0 TB)"),
        (10**18, 4 * 10**18, "1,000,000,000,000,000,000 (4000.0 PB)"),
    ],
)
def test_sizes(size, nbytes, text):
    assert size_text(size, nbytes) == text


def test_the_size_of_a_pytree():
    tree = {"a": jnp.ones((2, 3)), "b": [jax.ShapeDtypeStruct((5,), jnp.int8), 1, "x"]}
    assert array_size(tree) == (11, 29)


def test_a_class_that_does_not_say_how_it_prints():
    class Mute(Representable):
        pass

    with pytest.raises(NotImplementedError, match="Mute does not say how it prints"):
        repr(Mute())
