"""Donating state without being asked: ``nnx.jit`` reuses the memory of large arrays it replaces.

The first call of a function with large Variables traces it. If it does no more to its arguments
than to write new values, the large Variables among those that it writes are donated from then on
(on a GPU, the small ones beside them too): the function that is compiled takes them in an argument
of their own, and JAX puts the new arrays where the old ones were. The first call runs the user's
function once: what it compiles evaluates the traced program.

Why nobody loses an array: only an array that its Variable alone holds is donated
(``variablelib.ownership``); for another one a copy is put into the Variable first, which happens in
the first call and whenever anything else read or wrote the value since. A function with a host
callback, which may raise while the function runs, donates nothing unasked.

Why Ctrl-C loses nothing: ``list.extend`` runs ``map`` over a compiled function that returns lists,
and no Python code runs in between, so the interrupt is raised when the result is in a list already.
Whatever is raised from there on, the results are written to the Variables, if need be again. That
holds for calls that JAX makes without its own Python code: not for one that compiles, or runs a
callback, where an interrupt between the run and its results loses them.

On a GPU a brief function is compiled a second time, to take small arrays that it only reads packed
(``packing``). Why that changes no result: the second one is compiled from the program that was
traced for the first. Where ``jax.jit`` would have to trace the second, for other types or settings,
it refuses, and the first one is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from linnet import config
from linnet.functional.activations import on_gpu
from linnet.nnx.transforms import compiler_options
from linnet.nnx.transforms.arguments import Donated, VariableList
from linnet.nnx.transforms.compiler_options import programs_inside
from linnet.nnx.transforms.effects import Effects, Outcome
from linnet.nnx.transforms.errors import named_after
from linnet.nnx.transforms.packing import Packing, can_pack, in_usual_memory
from linnet.nnx.transforms.rewriting import evaluate, rewriting, with_kernels
from linnet.nnx.variablelib.ownership import (
    copy_unowned,
    donation_in_progress,
    note_owned,
    wait_for_donation,
)

LEAST_BYTES = 1 << 16  # smaller arrays are not worth the bookkeeping


class use_state_donation(config.Setting, env="LINNET_STATE_DONATION"):
    """Whether ``nnx.jit`` reuses the memory of large Variables that a function replaces.

    It is read when a function is first called with arguments of a new structure. Arrays that
    anybody else may hold are never touched. A step takes no more memory than with
    ``donate_argnums``. If a compiled function fails while it runs, for want of memory say,
    the Variables that it was about to replace are lost with it; switched off, they keep the values
    from before the call.

    Args:
      value: the new value.

    Example:
      >>> from linnet import nnx
      >>> with nnx.use_state_donation(False):
      ...     nnx.use_state_donation.current_value()
      False
    """


class _Callers:
    """Which threads call compiled functions.

    A second thread could read an array for a call of its own just before the first one donates it,
    so once there are two, nobody donates.
    """

    def __init__(self) -> None:
        self.only: int | None = None
        self.are_many = False


callers = _Callers()


def note_caller() -> None:
    """Notes which thread makes a call; if it is the second one, donations of the first end."""
    thread = threading.get_ident()
    if callers.only is None:
        callers.only = thread
    elif callers.only != thread and not callers.are_many:
        callers.are_many = True
        wait_for_donation(None)


def may_donate_now() -> bool:
    """Whether one thread alone calls compiled functions, and JAX compiles and runs them once."""
    settings: Any = jax.config
    repeats = settings.jax_debug_nans or settings.jax_debug_infs or settings.jax_disable_jit
    return not callers.are_many and not repeats


def is_large(value: Any) -> bool:
    """Whether a value is an array that is worth donating, in the memory of its device."""
    return _can_be_donated(value) and value.nbytes >= LEAST_BYTES


def _can_be_donated(value: Any) -> bool:
    if not isinstance(value, jax.Array) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return False
    return in_usual_memory(value)


def donates_small() -> bool:
    """Whether small arrays are donated beside large ones.

    On a GPU a call whose arrays stay where they are is cheaper to start: JAX launches a CUDA graph,
    and has to change it wherever an address changed.
    """
    return on_gpu()


def choose(outcome: Outcome, values: list[Any], plain: list[Any]) -> Donated | None:
    """The large Variables that a function writes, on a GPU small ones too; None without large."""
    effects = outcome.effects
    if not effects.writes_variables_only:
        return None
    replaced = {
        number
        for number, new in zip(effects.changed, outcome.written, strict=True)
        if _can_be_donated(values[number]) and _type_of(values[number]) == _type_of(new)
    }
    large = {number for number in replaced if is_large(values[number])}
    chosen = replaced if large and donates_small() else large
    if not chosen:
        return None
    return Donated(tuple([i in chosen for i in range(len(values))]), (False,) * len(plain))


def _type_of(value: Any) -> tuple[Any, Any]:
    return getattr(value, "shape", None), getattr(value, "dtype", None)


_PACKED_AT = 3  # the call from which on small arrays may be packed
_BRIEF = {"bytes accessed": (1e8, 4e9), "flops": (0, 1e12)}


def _is_brief(cost: Any) -> bool:
    """Whether a program takes about as long as its launch, judged by what it computes and moves."""
    found = cost if isinstance(cost, dict) else {}
    return all(low <= found.get(name, -1) <= high for name, (low, high) in _BRIEF.items())


def _are_new(values: list[Any], inputs: list[Any]) -> list[bool]:
    """Whether each of the values is a new array, and not one of the inputs.

    JAX hands an input through where the program says so, so that holds for all calls of a program.
    """
    before = set(map(id, inputs))
    return [isinstance(value, jax.Array) and id(value) not in before for value in values]


class _ResultLayout(NamedTuple):
    """How the arrays that a compiled function returns make up an outcome."""

    structure: Any
    effects: Effects
    written: Any  # the structure of the new values, which come first

    def new_values(self, leaves: list[Any]) -> Any:
        return self.written.unflatten(leaves[: self.written.num_leaves])


class _TracedProgram:
    """A program that was traced for inputs of some types, to be used instead of a new trace."""

    def __init__(self, program: Any, result: Any, inputs: Any):
        self._program, self._result = program, result
        self._structure = jax.tree_util.tree_structure(inputs)

    def evaluate(self, inputs: Any) -> Any:
        """What the program gives for these inputs; None if they are of other types."""
        leaves, structure = jax.tree_util.tree_flatten(inputs)
        types = list(map(jax.typeof, leaves))
        if structure != self._structure or types != list(self._program.in_avals):
            return None
        return evaluate(self._program, self._result, leaves)


class _NoProgramError(Exception):
    """The function that takes packed arrays was called for what it has no traced program for."""


class DonatingFunction:
    """A compiled function that takes some Variables in an argument of its own, and donates them.

    ``traced`` is the function as it was traced without donation, a moment ago, for ``inputs``. The
    first call, which follows at once, compiles that. Where JAX traces again later, for other types
    or settings, it traces ``pure``, because what a trace depends on may have changed. The compiled
    function returns a flat list of arrays, and a tuple whose length is the number of their layout
    in ``_layouts``: JAX builds both without running Python code. ``_packed`` is the same function
    for packed arrays.
    """

    def __init__(
        self,
        traced: Any,
        inputs: Any,
        donated: Donated,
        pure: Callable[..., Outcome],
        fun: Callable[..., Any],
        options: dict[str, Any],
    ):
        self.donated = donated
        self._layouts: list[_ResultLayout] = []
        # For each layout, by its number: which of the donated Variables get a new array.
        self._get_new: dict[int, list[bool]] = {}
        self._traced = _TracedProgram(with_kernels(traced.jaxpr), traced.out_info, inputs)
        self._final = rewriting(pure, with_kernels)  # no transform is applied to what it returns
        chosen = compiler_options.chosen(traced.jaxpr, options.get("compiler_options"))
        own = {"donate_argnums": (1,), "compiler_options": chosen}
        self._fun, self._options = fun, {**options, **own}
        self.jitted = self._jit(self._flat)
        self._calls = 0
        self._packing: Packing | None = None
        self._packed: Any = None  # before the call that makes it; False if there is none
        self._packed_was_traced = False

    def _jit(self, flat: Callable[..., Any], **options: Any) -> Any:
        def called(*inputs: Any) -> Any:  # jax.jit compiles once for each function object
            return flat(*inputs)

        return jax.jit(named_after(called, self._fun), **self._options | options)

    def _flat(self, values: Any, donated_values: Any, arrays: Any, plain: Any) -> Any:
        joined = self.donated.join(values, donated_values, plain)
        outcome = self._replayed((joined[0], (), arrays, joined[1]))
        if outcome is None:
            outcome = self._final(values, donated_values, arrays, plain)
        leaves, structure = jax.tree_util.tree_flatten(outcome)
        written = jax.tree_util.tree_structure(outcome.written)
        self._layouts.append(_ResultLayout(structure, outcome.effects, written))
        return leaves, ((),) * (len(self._layouts) - 1)

    def _replayed(self, inputs: Any) -> Any:
        """What the program that was traced for this call gives; None if there is none."""
        traced, self._traced = self._traced, None
        return None if traced is None else traced.evaluate(inputs)

    def _chosen_packing(self, inputs: Any) -> Packing | None:
        """What is packed, or None where it is not worth it."""
        packing = Packing(inputs[0]) if can_pack() else None
        if packing is None or not packing.is_worth_it():
            return None
        cost = self.jitted.lower(*inputs).compile().cost_analysis()
        return packing if _is_brief(cost) else None

    def _packed_inputs(self, kept: VariableList, inputs: Any) -> Any:
        """The inputs with small arrays packed; None where all are passed one by one: in the first
        calls, where packing is not worth it, and after one of them has changed."""
        self._calls += 1
        if self._packed is False or self._calls < _PACKED_AT:
            return None
        if self._packing is None:
            self._packing = self._chosen_packing(inputs)
            if self._packing is None:
                self._packed = False
                return None
        kept.remembered = self._packing.remember(inputs[0], kept.remembered)
        if kept.remembered is None or kept.remembered.packed is None:
            return None
        return kept.remembered.packed, self._packing.rest(inputs[0]), *inputs[1:]

    def _make_packed(self, inputs: Any, packing: Packing) -> Any:
        """The function that takes packed arrays, whose first call has to follow at once."""
        traced = self.jitted.trace(*inputs)
        self._traced = _TracedProgram(traced.jaxpr, traced.out_info, inputs)

        def unpack_and_run(packed: Any, rest: Any, *others: Any) -> Any:
            result = self._replayed((packing.unpack(packed, rest), *others))
            if result is None:
                raise _NoProgramError
            self._packed_was_traced = True
            return result

        return self._jit(unpack_and_run, donate_argnums=(2,))

    def _run(self, kept: VariableList, inputs: Any, results: list[Any]) -> None:
        """Appends what the compiled function returns for these inputs."""
        packed_inputs = self._packed_inputs(kept, inputs)
        if packed_inputs is not None:
            assert self._packing is not None
            if self._packed is None:
                self._packed = self._make_packed(inputs, self._packing)
            try:
                results.extend(map(self._packed, *[[part] for part in packed_inputs]))
            except _NoProgramError:
                if not self._packed_was_traced:  # its first call was interrupted
                    self._packed = None
            else:
                return
        results.extend(map(self.jitted, *[[part] for part in inputs]))

    def __call__(self, state: VariableList, arrays: list[Any], plain: list[Any]) -> Outcome:
        """Calls the function, and writes the values that it returns for Variables into them."""
        kept, chosen = state.divided(self.donated)
        results: list[Any] = []

        def write() -> None:
            for leaves, which in results:
                layout = self._layouts[len(which)]
                if layout.effects.writes_variables_only:
                    state.write(layout.effects, layout.new_values(leaves))

        with donation_in_progress(chosen.variables):
            copy_unowned(chosen.variables, chosen.cells)
            kept_values, values = [[cell.value for cell in part.cells] for part in (kept, chosen)]
            inputs = (kept_values, (values, []), arrays, plain)  # as ``Donated.divide`` has them
            try:
                self._run(kept, inputs, results)
                write()
            except BaseException:
                write()
                raise
            finally:
                self._traced = None
            leaves, which = results[0]
            are_new = self._get_new.get(len(which))
            if are_new is None:
                found = [cell.value for cell in chosen.cells]
                are_new = _are_new(found, [*kept_values, *values, *arrays, *plain])
                self._get_new[len(which)] = are_new
            owned = compress(chosen.variables, are_new), compress(chosen.cells, are_new)
            note_owned(*map(list, owned))
        return self._layouts[len(which)].structure.unflatten(leaves)


_HOST_CALLBACKS = ("pure_callback", "io_callback")


def _calls_the_host(program: Jaxpr) -> bool:
    """Whether Python code of the user's runs in a program, and may raise."""
    return any(
        eqn.primitive.name in _HOST_CALLBACKS or any(map(_calls_the_host, programs_inside(eqn)))
        for eqn in program.eqns
    )


def donating_function(
    traced: Any, inputs: Any, make_pure: Any, fun: Any, options: dict[str, Any]
) -> DonatingFunction | None:
    """The function that donates what a traced function replaces, or None if that is nothing.

    ``make_pure`` makes the function to trace for what is donated.
    """
    values, _, _, plain = inputs
    donated = choose(traced.out_info, values, plain)
    if donated is None or _calls_the_host(traced.jaxpr.jaxpr):
        return None
    return DonatingFunction(traced, inputs, donated, make_pure(donated), fun, options)
