"""The errors of Linen, of lifted transforms and of the older checkpoints.

Each takes the facts, as Flax's class of that name does, and words the message itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linnet.errors.general import LinnetError

# ---- random numbers and filters ------------------------------------------------------------------


class InvalidRngError(LinnetError, ValueError):
    """A random key is missing, or something is no key.

    Args:
      msg: the text.
    """

    def __init__(self, msg: str):
        super().__init__(msg)


class InvalidFilterError(LinnetError):
    """Something was given as a filter of collections that is none.

    Args:
      filter_like: what was given.
    """

    def __init__(self, filter_like: Any):
        super().__init__(
            f"{filter_like!r} ({type(filter_like).__name__}) is no filter of collections.\n"
            "Fix: True, False, a name, a collection of names, or DenyList of one of these."
        )


# ---- variables in scopes ------------------------------------------------------------------------


class ApplyScopeInvalidVariablesTypeError(LinnetError):
    """``apply`` was given something else than collections of variables."""

    def __init__(self) -> None:
        super().__init__(
            "The variables given to apply must be a dict of collections, each a dict with string "
            'keys.\nFix: module.apply({"params": params}, ...), or what module.init returned.'
        )


class ApplyScopeInvalidVariablesStructureError(LinnetError):
    """``apply`` was given a collection of parameters inside a collection of parameters.

    Args:
      variables: what was given.
    """

    def __init__(self, variables: Mapping[str, Any]):
        inner = ", ".join(map(repr, variables["params"]))
        super().__init__(
            'The variables given to apply have a "params" layer too many: the collection "params" '
            f"has the keys {inner}.\n"
            'Fix: pass on variables["params"], or do not wrap what module.init returned.'
        )


class ScopeParamNotFoundError(LinnetError):
    """A parameter is not among the variables.

    Args:
      param_name: the parameter.
      scope_path: the path of its scope.
    """

    def __init__(self, param_name: str, scope_path: str):
        super().__init__(
            f'There is no parameter "{param_name}" in scope "{scope_path}", and "params" is not '
            "mutable, so that none can be made.\n"
            "Fix: apply the module to the variables of its own init; a module that changed since "
            "needs new ones."
        )


class ScopeCollectionNotFound(LinnetError):
    """A variable was asked of a collection that is empty.

    Args:
      col_name: the collection.
      var_name: the variable.
      scope_path: the path of its scope.
    """

    def __init__(self, col_name: str, var_name: str, scope_path: str):
        super().__init__(
            f'"{var_name}" was asked of the collection "{col_name}" in scope "{scope_path}", but '
            "the collection is empty, and the variable cannot be made.\n"
            f'Fix: pass the collection to apply, or mutable=["{col_name}"] with an init_fn; inside '
            "a lifted transform, name it in variable_axes or variable_broadcast."
        )


class ScopeParamShapeError(LinnetError):
    """A parameter has another shape than its initializer gives.

    Args:
      param_name: the parameter.
      scope_path: the path of its scope.
      value_shape: the shape that it has.
      init_shape: the shape that the initializer gives.
    """

    def __init__(self, param_name: str, scope_path: str, value_shape: Any, init_shape: Any):
        super().__init__(
            f'Parameter "{param_name}" in scope "{scope_path}" has shape {value_shape}, but its '
            f"initializer gives shape {init_shape}.\n"
            "Fix: apply the module with the sizes and inputs it was initialized with, or "
            "initialize it anew."
        )


class ScopeVariableNotFoundError(LinnetError):
    """A variable is not in its collection, and no initializer was given.

    Args:
      name: the variable.
      col: its collection.
      scope_path: the path of its scope.
    """

    def __init__(self, name: str, col: str, scope_path: str):
        super().__init__(
            f'There is no variable "{name}" in collection "{col}" of scope "{scope_path}".\n'
            "Fix: pass the variable to apply, or give an initializer and make the collection "
            f'mutable: mutable=["{col}"].'
        )


class ModifyScopeVariableError(LinnetError):
    """A variable of a collection was written that is not mutable.

    Args:
      col: the collection.
      variable_name: the variable.
      scope_path: the path of its scope.
    """

    def __init__(self, col: str, variable_name: str, scope_path: str):
        super().__init__(
            f'Variable "{variable_name}" in scope "{scope_path}" cannot be written: its collection '
            f'"{col}" is not mutable in this call.\n'
            f'Fix: out, updates = module.apply(variables, ..., mutable=["{col}"]).'
        )


class ImmutableVariableError(LinnetError):
    """A variable was written that is not mutable.

    Not raised: kept for programs that catch it.

    Args:
      message: the text.
    """


class InvalidScopeError(LinnetError):
    """A scope was used after its end.

    Args:
      scope_name: the scope.
    """

    def __init__(self, scope_name: Any):
        super().__init__(
            f'The scope "{scope_name}" is no longer valid: the call that it belonged to is over.\n'
            "Fix: do not keep bound modules or scopes beyond init and apply; module.bind(variables)"
            " gives one that lasts."
        )


class JaxTransformError(LinnetError):
    """A variable was made or written in a JAX transform that was started inside of a module.

    Args:
      what: the variable.
    """

    def __init__(self, what: str = "A variable"):
        super().__init__(
            f"{what} was made or written inside a JAX transform (jit, grad, vmap, scan, ...) that "
            "was started within a module, and its value would not outlive the transform.\n"
            "Fix: use the lifted transform of linnet.linen (nn.jit, nn.scan, ...), and in it the "
            "module that the function is given; or apply the JAX transform to a function around "
            "the whole module.apply."
        )


class LazyInitError(LinnetError):
    """``lazy_init`` met a parameter whose value depends on an input without values.

    Args:
      partial_val: what is known of the value.
    """

    def __init__(self, partial_val: Any):
        super().__init__(
            f"A variable could not be computed from the inputs given to lazy_init: {partial_val}.\n"
            "Fix: pass arrays, not jax.ShapeDtypeStruct, for the arguments that it depends on."
        )


class PartitioningUnspecifiedError(LinnetError):
    """A lifted transform adds an axis to a variable with axis names, and has no name for it.

    Args:
      target: the variable.
    """

    def __init__(self, target: Any):
        super().__init__(
            f"A lifted transform adds an axis to the partitioned variable {target!r}, but "
            "metadata_params has no name for it.\n"
            'Fix: metadata_params={nn.PARTITION_NAME: "layers"}, with None for an axis that is '
            "not sharded."
        )


# ---- modules ------------------------------------------------------------------------------------


class NameInUseError(LinnetError):
    """A submodule, parameter or variable has the name of something else in its module.

    Args:
      key_type: what was to be named.
      value: the name.
      module_name: the module.
    """

    def __init__(self, key_type: str, value: str, module_name: str):
        super().__init__(
            f'Could not create {key_type} "{value}" in module {module_name}: the name is in use '
            "there.\n"
            "Fix: give it another name, or leave the name of a submodule out for an automatic one."
        )


class AssignSubModuleError(LinnetError):
    """A submodule was created where none can be.

    Args:
      cls: the submodule's class.
    """

    def __init__(self, cls: Any):
        super().__init__(
            f"Submodule {cls} must be defined in `setup()` or in a method decorated with "
            "`@compact`, but was created in another method.\n"
            f"Fix: create it in setup, self.layer = {cls}(...), or decorate the method."
        )


class SetAttributeInModuleSetupError(LinnetError):
    """A field of a module was set in ``setup``."""

    def __init__(self) -> None:
        super().__init__(
            "The fields of a module are its constructor's arguments, and cannot be set in setup.\n"
            "Fix: store the new value under another attribute, or pass it to the constructor."
        )


class SetAttributeFrozenModuleError(LinnetError):
    """An attribute was set on a module outside of ``setup``.

    Args:
      module_cls: the module's class.
      attr_name: the attribute.
      attr_val: the value.
    """

    def __init__(self, module_cls: str, attr_name: str, attr_val: Any):
        super().__init__(
            f"The module {module_cls} is frozen outside of setup: {attr_name} = {attr_val} cannot "
            "be set.\n"
            f"Fix: set it in setup; module.clone({attr_name}=...) gives a module with another "
            "field; for state, use self.variable."
        )


class MultipleMethodsCompactError(LinnetError):
    """A class has two ``@compact`` methods. Not raised: kept for programs that catch it."""

    def __init__(self) -> None:
        super().__init__(
            "Only one method per class can be decorated with @nn.compact: the automatic names of "
            "two would collide.\n"
            "Fix: create the submodules in setup, or use @nn.compact_name_scope for the others."
        )


class ReservedModuleAttributeError(LinnetError):
    """A class has a field ``parent``, or a ``name`` that is no text; every module has both.

    Args:
      annotations: the class's annotations.
    """

    def __init__(self, annotations: Any):
        super().__init__(
            "The fields `parent` and `name` are reserved: every module has them. This class has "
            f"the fields {', '.join(annotations)}.\nFix: choose another name for the field."
        )


class ApplyModuleInvalidMethodError(LinnetError):
    """``method=`` is neither a method of the module nor a function of it.

    Args:
      method: what was given.
    """

    def __init__(self, method: Any):
        super().__init__(
            f"Cannot call apply(), init() or bind() with method={method!r}.\n"
            'Fix: the name of a method ("encode"), the method (Model.encode, model.encode), or a '
            "function whose first parameter is the module."
        )


class UnboundModuleError(ValueError, AssertionError):
    """Variables or random keys were asked of a module that has none."""


class CallCompactUnboundModuleError(LinnetError):
    """A compact method was called on a module without variables."""

    def __init__(self) -> None:
        super().__init__(
            "Can't call compact methods on unbound modules: a module has no variables before init, "
            "apply or bind.\n"
            "Fix: module.apply(variables, x) instead of module(x), or module.bind(variables)(x)."
        )


class CallSetupUnboundModuleError(LinnetError):
    """``setup`` was called on a module without variables."""

    def __init__(self) -> None:
        super().__init__(
            "Can't call setup() on an unbound module: it runs by itself once a module is bound.\n"
            "Fix: module.apply(variables, ...) or module.bind(variables)."
        )


class CallUnbindOnUnboundModuleError(LinnetError):
    """``unbind`` was called on a module without variables."""

    def __init__(self) -> None:
        super().__init__(
            "Can't call `unbind()` on unbound modules: there are no variables to return.\n"
            "Fix: module.bind(variables).unbind()."
        )


class CallShareScopeOnUnboundModuleError(LinnetError):
    """``share_scope`` was called with a module without variables."""

    def __init__(self) -> None:
        super().__init__(
            "Can't call `share_scope` on unbound modules.\n"
            "Fix: call nn.share_scope(self, self.submodule) in setup or in a compact method."
        )


class InvalidInstanceModuleError(LinnetError):
    """``init``, ``apply`` or the like was called on a class, not on a module."""

    def __init__(self) -> None:
        super().__init__(
            "Can only call init, init_with_output, apply or bind on an instance of a module, but "
            "it was called on the class.\nFix: Model(...).init(key, x)."
        )


class IncorrectPostInitOverrideError(LinnetError):
    """A class has a ``__post_init__`` that does not call the one of Module."""

    def __init__(self) -> None:
        super().__init__(
            "Overrode `.__post_init__()` without calling `super().__post_init__()`.\n"
            "Fix: call super().__post_init__() at its end."
        )


class DescriptorAttributeError(LinnetError):
    """A property or other descriptor of a module failed with an AttributeError."""

    def __init__(self) -> None:
        super().__init__(
            "A property or descriptor of a module raised an AttributeError, which Python would "
            "take for a missing property.\n"
            "Fix: see the error above this one; the property itself reads a missing attribute."
        )


# ---- lifted transforms --------------------------------------------------------------------------


class TransformedMethodReturnValueError(LinnetError):
    """A method that was transformed returns a module or a variable.

    Args:
      name: the method.
    """

    def __init__(self, name: str):
        super().__init__(
            f"The transformed method {name} returned a module or a variable, which belong to the "
            "inside of the transform.\nFix: return arrays."
        )


class TransformTargetError(LinnetError):
    """A lifted transform was given something else than a module class or a function.

    Args:
      target: what was given.
    """

    def __init__(self, target: Any):
        super().__init__(
            f"Linen transforms take a module class or a function whose first parameter is a "
            f"module, but got {target!r} ({type(target).__name__}).\n"
            "Fix: nn.jit(Dense)(features) instead of nn.jit(Dense(features))."
        )


# ---- checkpoints, traversals and cursors --------------------------------------------------------


class AlreadyExistsError(LinnetError):
    """There is a file, or a checkpoint of the same step or a later one.

    Args:
      path: the file or checkpoint.
    """

    def __init__(self, path: Any):
        super().__init__(
            f'Trying overwrite an existing checkpoint or save an outdated one: "{path}" is there.\n'
            "Fix: overwrite=True, another folder, or a higher step."
        )


class InvalidCheckpointError(LinnetError):
    """A checkpoint of the last step or of an earlier one was to be saved.

    Args:
      path: the checkpoint to be saved.
      step: the step to be saved.
    """

    def __init__(self, path: Any, step: Any):
        super().__init__(
            f'Trying to save an outdated checkpoint at step: "{step}" and path: "{path}".\n'
            "Fix: overwrite=True, which deletes the later ones, or a higher step."
        )


class MPACheckpointingRequiredError(LinnetError):
    """An array spread over several processes was to be saved without Orbax.

    Args:
      path: the checkpoint.
      step: the step.
    """

    def __init__(self, path: Any, step: Any):
        super().__init__(
            f'The checkpoint "{path}" of step {step} holds arrays that are spread over several '
            "processes.\nFix: save with Orbax: pass orbax_checkpointer."
        )


class MPARestoreTargetRequiredError(LinnetError):
    """An array spread over several processes can be restored only with a target.

    Args:
      path: the checkpoint.
      step: the step.
      key: the array.
    """

    def __init__(self, path: Any, step: Any, key: Any = None):
        what = f'the array "{key}"' if key is not None else "arrays"
        super().__init__(
            f'The checkpoint "{path}" of step {step} holds {what} spread over several processes, '
            "and no target says how.\nFix: pass a target with such arrays."
        )


class MPARestoreDataCorruptedError(LinnetError):
    """A checkpoint leaves arrays to other files, as older programs did in several processes.

    Args:
      step: the step.
      path: the checkpoint.
    """

    def __init__(self, step: Any, path: Any):
        super().__init__(
            f'The checkpoint "{path}" of step {step} leaves arrays to other files, which are not '
            "read.\nFix: allow_partial_mpa_restoration=True takes them from the target."
        )


class TraverseTreeError(LinnetError):
    """A traversal was given both an update function and a condition, or neither.

    Not raised: kept for programs that catch it.

    Args:
      update_fn: the update function.
      cond_fn: the condition.
    """

    def __init__(self, update_fn: Any, cond_fn: Any):
        given = "Both" if update_fn is not None else "Neither"
        super().__init__(
            f"{given} of update_fn={update_fn} and cond_fn={cond_fn} were given.\n"
            "Fix: give exactly one of them."
        )


class CursorFindError(LinnetError):
    """``Cursor.find`` found nothing, or more than one node.

    Args:
      cursor: the first node that was found.
      cursor2: the second one.
    """

    def __init__(self, cursor: Any = None, cursor2: Any = None):
        if cursor is not None and cursor2 is not None:
            super().__init__(
                "More than one node meets the condition of Cursor.find; the first two are at "
                f"{cursor._path} and {cursor2._path}.\n"
                "Fix: make the condition narrower, or use find_all."
            )
        else:
            super().__init__(
                "No node meets the condition of Cursor.find.\n"
                "Fix: widen the condition; it is called with the path and the value of each node."
            )
