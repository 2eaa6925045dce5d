"""``nnx.jit``: compiled functions of live objects.

A call outside of all traces goes like this (``JitFunction.__call__``):

1. Static arguments are set aside, and the others are flattened, objects being leaves.
2. The plan for these objects is looked up by their ids (``plan``). If it holds, its records say
   what the objects consist of, and nothing is walked. An object is walked in the first two calls
   that it is passed to, of whichever compiled functions, and after a change of its structure.
3. The definitions of the objects give the ``CompiledEntry``: the function that ``jax.jit`` compiled
   for this structure.
4. The raw values of the Variables are read into a flat list, and the entry is called with it, with
   the arrays in attributes, and with the plain leaves. If it replaces large Variables, another
   function is called, which takes these in a donated argument (``donation``).
5. If only values changed, they are written back in one pass. Otherwise ``engine.close`` does it.

While JAX traces, ``JitFunction._pure`` enters, runs and leaves as every transform does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from itertools import compress
from operator import attrgetter, call, is_, not_
from threading import get_ident
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

import jax

from linnet.functional.fusing import is_tracing
from linnet.nnx.graphlib.graphdef import graph_modes
from linnet.nnx.modules.module import capture_run
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.tracing import compiling
from linnet.nnx.transforms import (
    arguments,
    compiler_options,
    donation,
    plan as plans,
    retrace,
)
from linnet.nnx.transforms.arguments import (
    NO_STATIC,
    NOTHING_DONATED,
    Donated,
    Given,
    StaticArguments,
    VariableList,
    after_module,
    as_tuple,
    refuse_bound_method,
)
from linnet.nnx.transforms.effects import GraphUpdates, Outcome, sown_only
from linnet.nnx.transforms.engine import (
    Opened,
    Structure,
    close,
    open_tree,
)
from linnet.nnx.transforms.entry import (
    CompiledEntry,
    CompiledFunctions,
    LatestNodes,
    Signature,
    SignatureTable,
)
from linnet.nnx.transforms.errors import (
    FailedCall,
    argument_paths,
    named_after,
    refuse_untraceable_output,
)
from linnet.nnx.transforms.lowering import Lowered, PartialJit, Traced
from linnet.nnx.transforms.option_types import JitOptions, P, R
from linnet.nnx.transforms.rewriting import rewriting
from linnet.nnx.transforms.staging import close_shapes

_definition_of = attrgetter("hashed_definition")

Q = ParamSpec("Q")
S = TypeVar("S")


@overload
def jit(fun: Callable[P, R], **options: Unpack[JitOptions]) -> JitFunction[P, R]: ...
@overload
def jit(fun: None = None, **options: Unpack[JitOptions]) -> JitDecorator: ...
def jit(
    fun: Any = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | tuple[int, ...] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compiles a function whose arguments and outputs may be live modules.

    What the function writes to Variables reaches the objects that were passed in. A step costs what
    a hand-written ``jax.jit`` over a flat list of the same arrays costs.

    Args:
      fun: the function, or a module, which is then passed to its ``__call__`` as an argument
        that the numbers below do not count; left out, the call is a decorator.
      in_shardings: as for ``jax.jit``, with ``StateSharding`` for objects.
      out_shardings: likewise.
      static_argnums: arguments that are part of what is compiled.
      static_argnames: the same by name.
      donate_argnums: arguments whose buffers may be reused; objects get new ones.
      donate_argnames: the same by name.
      keep_unused, device, backend, inline: as for ``jax.jit``.
      compiler_options: as for ``jax.jit``: options of the compiler, by name.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The compiled function, with ``lower``, ``trace``, ``eval_shape`` and ``clear_cache``;
      ``jitted_fn._cache_size()`` tells how often it was compiled.

    Raises:
      ValueError: ``fun`` is a bound method of a module.
      TypeError: it cannot be called.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Counter(nnx.Module):
      ...     def __init__(self):
      ...         self.n = nnx.Variable(jnp.zeros((), jnp.int32))
      >>> @nnx.jit
      ... def count(counter, by):
      ...     counter.n[...] += by
      >>> counter = Counter()
      >>> for by in range(4):
      ...     count(counter, by)
      >>> int(counter.n.value)
      6
    """
    options = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    rare = {"device": device, "backend": backend, "compiler_options": compiler_options}
    options |= {name: value for name, value in rare.items() if value is not None}

    def make(fun: Any) -> Any:
        refuse_bound_method(fun, "jit")
        if not callable(fun):
            raise TypeError(f"nnx.jit takes a function or a module that is one, but got {fun!r}.")
        if isinstance(fun, Pytree):
            method = getattr(type(fun), "__call__")  # noqa: B004, B009
            shifted = after_module(options)
            return PartialJit(JitFunction(method, "jit", graph, graph_updates, shifted), fun)
        return JitFunction(fun, "jit", graph, graph_updates, dict(options))

    return make if fun is None else make(fun)


def jit_partial(
    fun: Callable[..., Any],
    *partial_args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | tuple[int, ...] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """``functools.partial(nnx.jit(fun, ...), *partial_args)``.

    Args:
      fun: the function.
      *partial_args: its first arguments.
      in_shardings, out_shardings: as for ``jit``.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as for ``jit``.
      keep_unused, device, backend, inline, graph, graph_updates: as for ``jit``.

    Returns:
      The compiled function of the remaining arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> forward = nnx.jit_partial(lambda model, x: model(x), model)
      >>> forward(jnp.ones((1, 2))).shape
      (1, 3)
    """
    jitted = jit(
        fun,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused,
        device=device,
        backend=backend,
        inline=inline,
        graph=graph,
        graph_updates=graph_updates,
    )
    return PartialJit(jitted, *partial_args)


def cached_partial(
    f: Callable[..., Any],
    *cached_args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """``functools.partial``, for programs written for Flax; ``nnx.jit`` is as fast without it.

    Args:
      f: a function made by ``nnx.jit``, or any other.
      *cached_args: its first arguments.
      graph, graph_updates: accepted for symmetry.

    Returns:
      The function of the remaining arguments.

    Example:
      >>> from linnet import nnx
      >>> add = nnx.cached_partial(nnx.jit(lambda v, x: v + x), nnx.Variable(1.0))
      >>> float(add(2.0))
      3.0
    """
    del graph, graph_updates
    partial = PartialJit if isinstance(f, JitFunction) else functools.partial
    return partial(f, *cached_args)


class JitDecorator(Protocol):
    """``nnx.jit`` without a function."""

    def __call__(self, fun: Callable[P, R], /) -> JitFunction[P, R]:
        """Compiles a function."""
        ...


class JitFunction(Generic[P, R]):
    """A function compiled by ``nnx.jit``; called like the function it wraps."""

    def __init__(self, fun: Callable[P, R], api: str, graph: Any, updates: Any, options: Any):
        functools.update_wrapper(self, fun)
        self._made_from = (fun, api, graph, updates, dict(options))
        self.fun, self._api, self._options = fun, api, options
        self._graph, self._updates = graph, updates
        self._static_nums = as_tuple(options.pop("static_argnums", None))
        self._static_names = set(as_tuple(options.pop("static_argnames", None)))
        self._donate_nums = as_tuple(options.pop("donate_argnums", None))
        self._donate_names = set(as_tuple(options.pop("donate_argnames", None)))
        self._in_shardings = options.pop("in_shardings", None)
        self._out_shardings = options.pop("out_shardings", None)
        self.traces = retrace.TraceLog(fun)
        self._resolve_names()
        self._entries: dict[Any, CompiledEntry] = {}
        self._tables: dict[Any, SignatureTable] = {}
        self._only: tuple[Any, Structure] | None = None  # compiled ahead of time: see ``running``

    def _resolve_names(self) -> None:
        """Finds the names of arguments that were given by number, and the reverse."""
        names = self.traces.parameters
        size = len(names)
        for nums, found in (
            ("_static_nums", self._static_names),
            ("_donate_nums", self._donate_names),
        ):
            numbers = [n + size if n < 0 else n for n in getattr(self, nums)]
            by_name = [names.index(name) for name in found if name in names]
            found.update(names[n] for n in numbers if n < size)
            setattr(self, nums, tuple(sorted({*numbers, *by_name})))

    @overload
    def __get__(self, instance: None, owner: Any = None) -> JitFunction[P, R]: ...
    @overload
    def __get__(
        self: JitFunction[Concatenate[S, Q], R], instance: S, owner: Any = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"nnx.{self._api}({self.fun!r})"

    def __reduce__(self) -> Any:
        return type(self), self._made_from

    # ---- calling --------------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(self._flatten(args, kwargs))

    def _call(self, given: Given) -> Any:
        signature = self._signature(given)
        if is_tracing():
            opened = self._open(given, signature.graph)
            entry = self._entry(opened, signature)
            values, arrays, plain = opened.variable_values, opened.arrays, opened.plain
            return close(opened, self._dispatch(entry, values, arrays, plain, given))
        leaves, are_nodes = given.leaves, given.are_nodes
        roots = list(compress(leaves, are_nodes))
        plain = [] if len(roots) == len(leaves) else list(compress(leaves, map(not_, are_nodes)))
        table = self._tables.get(signature) or self._tables.setdefault(signature, SignatureTable())
        plan = table.plans.get(tuple(map(id, roots)))
        # The plan may have been made for other objects with the same ids.
        if plan is not None and not all(map(is_, map(call, plan.roots), roots)):
            plan = None
        taken = []
        try:
            for lock in plans.locks_of(roots) if plan is None else plan.locks:
                lock.acquire()
                taken.append(lock)
            return self._call_outside(given, roots, plain, signature, table, plan)
        finally:
            for lock in taken:
                lock.release()

    def _signature(self, given: Given) -> Signature:
        graph, updates = graph_modes(self._graph, self._updates)
        is_capturing = capture_run.get() is not None
        fields = (graph, updates or sown_only(), is_capturing)
        fields += (given.treedef, given.static, given.are_nodes)
        return tuple.__new__(Signature, fields)  # faster than the class

    def _drop(self, entry: CompiledEntry, records: list[plans.Record]) -> None:
        """Forgets an entry, and what was remembered of the objects of its latest call."""
        self._entries = {key: other for key, other in self._entries.items() if other is not entry}
        self._tables.clear()
        for record in records:
            record.has_ended = True

    def _call_outside(
        self,
        given: Given,
        roots: list[Any],
        plain: list[Any],
        signature: Signature,
        table: SignatureTable,
        plan: plans.Plan | None,
    ) -> Any:
        """Makes a call outside of all traces, while the locks of the objects are held."""
        if donation.callers.only != get_ident():
            donation.note_caller()
        records = None if plan is None else plan.valid_records()
        if records is None:
            graph, where = signature.graph, self.traces.where
            records = plans.find_records(roots, graph, self._api, where, given.tree)
            plan = plans.make_plan(roots, records, table.plans)
        if plans.CHECK_PLANS:
            planned = self._open_recorded(given, records, plain)
            walk = functools.partial(self._open, given, signature.graph)
            plans.check(planned, walk, self.traces, self._api)
        definitions = tuple(map(_definition_of, records))
        entry = table.find(definitions)
        if entry is None:
            opened = self._open_recorded(given, records, plain)
            self._refuse_both(given.static, opened)
            entry = self._entry(opened, signature)
            table.add(definitions, entry)
        entry.latest.hashed_definitions = definitions
        try:
            return self._call_entry(entry, given, records, plan, plain)
        finally:
            if entry.latest.are_outdated:
                self._drop(entry, records)

    def _call_entry(
        self,
        entry: CompiledEntry,
        given: Given,
        records: list[plans.Record],
        plan: plans.Plan | None,
        plain: list[Any],
    ) -> Any:
        """Calls what was compiled, and writes back what it did."""
        state = (plan and plan.state) or plans.state_of(records)
        arrays: list[Any] = []
        for record in records:
            if record.places:
                arrays += record.arrays()
        if entry.donating_function is not False and donation.may_donate_now():
            # A call that raises while it is traced leaves it None.
            if entry.donating_function is None:
                entry.donating_function = self._prepare(entry, state, arrays, plain, given) or False
            if entry.donating_function:
                return self._call_donating(
                    entry.donating_function, given, records, state, arrays, plain
                )
        outcome = self._dispatch(entry, entry.read(state.cells), arrays, plain, given)
        if outcome.effects.writes_variables_only and not entry.uses_refs:
            state.write(outcome.effects, outcome.written)
            return outcome.plain
        return close(self._open_recorded(given, records, plain), outcome)

    def _prepare(
        self, entry: CompiledEntry, state: VariableList, arrays: Any, plain: Any, given: Given
    ) -> donation.DonatingFunction | None:
        """Decides by a trace, before the first call, what is donated and how to compile.

        Returns the function that donates state. If there is none to donate, returns None and, where
        other compiler options suit the program, gives ``entry.jitted`` these. JAX keeps the trace,
        so that the call does not trace again.
        """
        values = entry.read(state.cells)
        wanted = donation.use_state_donation.current_value() and not entry.takes_values
        donates = wanted and any(map(donation.is_large, values))
        if entry.make_pure is None or not (donates or compiler_options.are_chosen()):
            return None
        try:
            inputs = entry.donated.divide(values, arrays, plain)
            traced = entry.jitted.trace(*inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            self._explain(error, entry.donated, given)
            raise
        options, make_pure = self._options, entry.make_pure
        if donates:
            donating = donation.donating_function(traced, inputs, make_pure, self.fun, options)
            if donating is not None:
                return donating
        suited = compiler_options.chosen(traced.jaxpr, options.get("compiler_options"))
        if suited != options.get("compiler_options"):
            entry.jitted = entry.jit(compiler_options=suited)
        return None

    def _call_donating(
        self,
        donating: donation.DonatingFunction,
        given: Given,
        records: list[plans.Record],
        state: VariableList,
        arrays: list[Any],
        plain: list[Any],
    ) -> Any:
        """Makes a call that donates, and writes back what it did."""
        try:
            outcome = donating(state, arrays, plain)
        except (RuntimeError, ValueError, TypeError) as error:
            self._explain(error, donating.donated, given)
            raise
        if outcome.effects.writes_variables_only:
            return outcome.plain
        return close(self._open_recorded(given, records, plain), outcome)

    def _open_recorded(self, given: Given, records: list[plans.Record], plain: list[Any]) -> Opened:
        """Opens the arguments from records, without a walk."""
        tree = given.tree()
        return plans.opened_from(given.treedef, given.leaves, records, plain, tree)

    def _dispatch(
        self, entry: CompiledEntry, values: Any, arrays: Any, plain: Any, given: Given
    ) -> Outcome:
        inputs = (values, (), arrays, plain)
        if entry.donated is not NOTHING_DONATED:
            inputs = entry.donated.divide(values, arrays, plain)
        try:
            return entry.jitted(*inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            self._explain(error, entry.donated, given)
            raise

    def _explain(self, error: Exception, donated: Donated, given: Given) -> None:
        """Adds to an error of JAX what it is about, in terms of the user's arguments."""
        opened = open_tree(given.tree(), True, self._api)
        FailedCall(error, opened, donated, self.fun, self._api, self.traces.where).explain()

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Flattens the arguments, objects being leaves, and sets static ones aside."""
        static = NO_STATIC
        if self._static_nums or self._static_names:
            static, args, kwargs = self._take_static(args, kwargs)
        return arguments.flatten(args, kwargs, static)

    def _open(self, given: Given, graph: bool) -> Opened:
        """Opens the arguments by a walk."""
        tree = given.tree()
        opened = open_tree(tree, graph, self._api, where=self.traces.where)
        self._refuse_both(given.static, opened)
        return opened

    def _take_static(self, args: Any, kwargs: Any) -> Any:
        """Separates static arguments from the others, which have None in their places."""
        static_args = tuple(
            (number, args[number]) for number in self._static_nums if number < len(args)
        )
        static_kwargs = tuple((k, v) for k, v in sorted(kwargs.items()) if k in self._static_names)
        for where, value in (*static_args, *static_kwargs):
            self._check_static(where, value)
        numbers = {number for number, _ in static_args}
        rest = tuple(None if n in numbers else arg for n, arg in enumerate(args))
        named = {k: v for k, v in kwargs.items() if k not in self._static_names}
        types = tuple(arguments.exact_type(x) for _, x in (*static_args, *static_kwargs))
        return StaticArguments(static_args, static_kwargs, types), rest, named

    def _check_static(self, where: Any, value: Any) -> None:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"Non-hashable static argument {where!r} of nnx.{self._api}: "
                f"{type(value).__name__}.\nFix: pass something hashable, such as a tuple, or do "
                "not mark it static."
            ) from None

    def _refuse_both(self, static: StaticArguments, opened: Opened) -> None:
        """Raises for an object that is a static argument and an ordinary one at once."""
        if static is NO_STATIC:
            return
        met = {id(thing) for thing in opened.things}
        for where, value in (*static.args, *static.kwargs):
            inside = open_tree(value, True, self._api).things
            if any(is_node(thing) and id(thing) in met for thing in inside):
                raise ValueError(
                    f"The {type(value).__name__} given as static argument {where!r} of "
                    f"nnx.{self._api} is also part of another argument, so its arrays would be "
                    "constants in one place and traced in the other.\n"
                    "Fix: pass it once, and not as a static argument."
                )

    def _donated(self, opened: Opened) -> Donated:
        """Which Variables and plain leaves are in a donated argument."""
        if not self._donate_nums and not self._donate_names:
            return NOTHING_DONATED
        wanted = {(0, n) for n in self._donate_nums} | {(1, name) for name in self._donate_names}
        return Donated(
            tuple(path[:2] in wanted for path in opened.variable_paths),
            tuple(path[:2] in wanted for path in opened.plain_paths),
        )

    def _entry(self, opened: Opened, signature: Signature) -> CompiledEntry:
        """The entry for opened arguments, made if there is none."""
        graph, updates, is_capturing, _, static, _ = signature
        donated = self._donated(opened)
        latest = LatestNodes(opened.at_nodes(list(opened.structure.hashed_definitions)))
        if self._only is not None:
            self._check_structure(opened.structure, self._only[1])
            compiled = self._only[0]
            return CompiledEntry(opened.structure, donated, lambda: compiled, True, None, latest)
        key = (opened.structure, static, donated, graph, updates, is_capturing)
        entry = self._entries.get(key)
        if entry is None:
            jit_options = dict(self._options)
            shardings = None
            if self._in_shardings is not None or self._out_shardings is not None:
                inputs = arguments.with_gaps(self._in_shardings, static)
                where, outputs = self.traces.where, self._out_shardings
                shardings = arguments.Shardings(opened, inputs, outputs, graph, where)
            make = functools.partial(
                self._pure, opened.structure, latest, shardings, graph, updates, static
            )
            pure = make(donated)
            if shardings is not None:
                jit_options |= shardings.jit_options(opened, donated, pure)
            if donated.any:
                jit_options["donate_argnums"] = (1,)
            jit_pure = functools.partial(jax.jit, pure, **jit_options)
            takes_values = shardings is not None or donated.any
            entry = CompiledEntry(opened.structure, donated, jit_pure, takes_values, make, latest)
            self._entries[key] = entry
        entry.latest.hashed_definitions = latest.hashed_definitions
        return entry

    def _pure(
        self,
        structure: Structure,
        latest: LatestNodes,
        shardings: arguments.Shardings | None,
        graph: bool,
        updates: GraphUpdates,
        static: StaticArguments,
        donated: Donated,
    ) -> Callable[..., Outcome]:
        """The function of arrays that JAX compiles for one structure."""
        fun, api, traces = self.fun, self._api, self.traces
        # These come back, changed or not: a donated buffer is gone, and what was given a sharding
        # is to be left in it.
        returned = frozenset(donated.numbers)
        if shardings is not None and updates is True:
            returned |= shardings.placed

        def with_static(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = static.put_back(args, kwargs)
            return fun(*args, **kwargs)

        def pure(values: Any, donated_values: Any, arrays: Any, plain: Any) -> Outcome:
            values, plain = donated.join(values, donated_values, plain)
            own = structure.with_nodes(latest.hashed_definitions)
            latest.are_outdated = latest.are_outdated or not own.statics_still_fit()
            inside = own.enter([*values, *arrays], plain)
            traces.add(inside.tree, static)
            with compiling(traces.name):
                out = inside.run(with_static)
            if shardings is not None:
                shardings.refuse_two_ways(inside, out)
            refuse_untraceable_output(out, api)
            effects, new, leaves = inside.leave(
                out, graph, updates, api, traces.where, with_detached=updates is True
            )
            effects = inside.with_moved(effects)
            if returned:
                effects = inside.with_returned(effects, returned)
            if not any(effects.output_nodes):
                effects = dataclasses.replace(effects, out_treedef=None, output_nodes=())
                leaves = out
            return inside.outcome(effects, new, leaves)

        return rewriting(named_after(pure, fun))

    # ---- beside calling -------------------------------------------------------------------------

    @property
    def jitted_fn(self) -> CompiledFunctions:
        """What was compiled so far; ``jitted_fn._cache_size()`` counts it, as for ``jax.jit``."""
        return CompiledFunctions(self)

    def _inspect(self, args: Any, kwargs: Any) -> Any:
        """The opened arguments, the static ones, the entry, and what it is called with."""
        given = self._flatten(args, kwargs)
        signature = self._signature(given)
        opened = self._open(given, signature.graph)
        entry = self._entry(opened, signature)
        inputs = entry.donated.divide(opened.variable_values, opened.arrays, opened.plain)
        return opened, given.static, entry, inputs

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers for these arguments without running."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces for these arguments without running; see ``jax.jit``."""
        opened, static, entry, inputs = self._inspect(args, kwargs)
        traced = Traced(self, entry.jitted.trace(*inputs), opened.structure, static)
        traced.paths = argument_paths(opened, entry.donated)
        return traced

    def running(self, compiled: Any, structure: Structure) -> JitFunction:
        """The same function for arguments of one structure, with the compiled code for them."""
        function = JitFunction.__new__(JitFunction)
        function.__dict__.update(self.__dict__)
        function._tables = {}
        function._only = (compiled, structure)
        return function

    def _check_structure(self, found: Structure, wanted: Structure) -> None:
        if found != wanted:
            reason = retrace.difference(self.traces, wanted, found)
            raise TypeError(
                f"This compiled function is for other arguments: {reason}.\n"
                "Fix: lower and compile it for these; static arguments are left out of the call."
            )

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes of the output for these arguments, without running."""
        opened, _, entry, inputs = self._inspect(args, kwargs)
        return close_shapes(opened, entry.jitted.eval_shape(*inputs), self._api)

    def clear_cache(self) -> None:
        """Forgets everything compiled so far."""
        for entry in self._entries.values():
            entry.clear_cache()
        self._entries.clear()
        self._tables.clear()
