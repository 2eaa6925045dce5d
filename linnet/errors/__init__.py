"""The errors that Linnet raises, and how they print paths and lists.

Every message says what went wrong, where (the path of the module or Variable), what was found there
and how to fix it. Each error is a subclass of the builtin that programs already catch.

``general`` has those of NNX, of the storage and the rest, ``linen`` those of Linen.
"""

from linnet.errors.general import (
    AbstractValueError as AbstractValueError,
)
from linnet.errors.general import (
    AxisError as AxisError,
)
from linnet.errors.general import (
    BranchError as BranchError,
)
from linnet.errors.general import (
    CacheError as CacheError,
)
from linnet.errors.general import (
    CarryError as CarryError,
)
from linnet.errors.general import (
    CheckpointArgumentError as CheckpointArgumentError,
)
from linnet.errors.general import (
    CheckpointBusyError as CheckpointBusyError,
)
from linnet.errors.general import (
    CheckpointExistsError as CheckpointExistsError,
)
from linnet.errors.general import (
    CheckpointMismatchError as CheckpointMismatchError,
)
from linnet.errors.general import (
    CheckpointNotFoundError as CheckpointNotFoundError,
)
from linnet.errors.general import (
    CheckpointWriteError as CheckpointWriteError,
)
from linnet.errors.general import (
    CyclicReferenceError as CyclicReferenceError,
)
from linnet.errors.general import (
    DamagedCheckpointError as DamagedCheckpointError,
)
from linnet.errors.general import (
    DamagedCheckpointWarning as DamagedCheckpointWarning,
)
from linnet.errors.general import (
    DataError as DataError,
)
from linnet.errors.general import (
    DonatedBufferError as DonatedBufferError,
)
from linnet.errors.general import (
    DroppedWriteWarning as DroppedWriteWarning,
)
from linnet.errors.general import (
    ExportError as ExportError,
)
from linnet.errors.general import (
    FeatureError as FeatureError,
)
from linnet.errors.general import (
    FilterError as FilterError,
)
from linnet.errors.general import (
    FlaxError as FlaxError,
)
from linnet.errors.general import (
    GradientTypeError as GradientTypeError,
)
from linnet.errors.general import (
    HiddenDataWarning as HiddenDataWarning,
)
from linnet.errors.general import (
    InPlaceError as InPlaceError,
)
from linnet.errors.general import (
    LayerArgumentError as LayerArgumentError,
)
from linnet.errors.general import (
    LinnetError as LinnetError,
)
from linnet.errors.general import (
    LostVariableWarning as LostVariableWarning,
)
from linnet.errors.general import (
    MetricError as MetricError,
)
from linnet.errors.general import (
    MissingEntryError as MissingEntryError,
)
from linnet.errors.general import (
    MissingPackageError as MissingPackageError,
)
from linnet.errors.general import (
    MissingStepError as MissingStepError,
)
from linnet.errors.general import (
    MissingStreamAttributeError as MissingStreamAttributeError,
)
from linnet.errors.general import (
    MissingStreamKeyError as MissingStreamKeyError,
)
from linnet.errors.general import (
    ModeError as ModeError,
)
from linnet.errors.general import (
    NameMapError as NameMapError,
)
from linnet.errors.general import (
    NotACheckpointError as NotACheckpointError,
)
from linnet.errors.general import (
    Path as Path,
)
from linnet.errors.general import (
    PrecisionError as PrecisionError,
)
from linnet.errors.general import (
    RecordError as RecordError,
)
from linnet.errors.general import (
    RenameError as RenameError,
)
from linnet.errors.general import (
    RngsError as RngsError,
)
from linnet.errors.general import (
    SerializationError as SerializationError,
)
from linnet.errors.general import (
    ShapeChangeWarning as ShapeChangeWarning,
)
from linnet.errors.general import (
    SharedNoiseWarning as SharedNoiseWarning,
)
from linnet.errors.general import (
    SharedReferenceError as SharedReferenceError,
)
from linnet.errors.general import (
    StaleConstantWarning as StaleConstantWarning,
)
from linnet.errors.general import (
    StateMismatchError as StateMismatchError,
)
from linnet.errors.general import (
    StaticDataError as StaticDataError,
)
from linnet.errors.general import (
    StorageError as StorageError,
)
from linnet.errors.general import (
    SummaryError as SummaryError,
)
from linnet.errors.general import (
    TensorFileError as TensorFileError,
)
from linnet.errors.general import (
    TraceContextError as TraceContextError,
)
from linnet.errors.general import (
    TransformationError as TransformationError,
)
from linnet.errors.general import (
    UnsafePathError as UnsafePathError,
)
from linnet.errors.general import (
    UnstorableError as UnstorableError,
)
from linnet.errors.general import (
    UntraceableError as UntraceableError,
)
from linnet.errors.general import (
    check_entries as check_entries,
)
from linnet.errors.general import (
    integer_hint as integer_hint,
)
from linnet.errors.general import (
    list_lines as list_lines,
)
from linnet.errors.general import (
    list_paths as list_paths,
)
from linnet.errors.general import (
    name_some as name_some,
)
from linnet.errors.general import (
    path_string as path_string,
)
from linnet.errors.general import (
    type_text as type_text,
)
from linnet.errors.linen import (
    AlreadyExistsError as AlreadyExistsError,
)
from linnet.errors.linen import (
    ApplyModuleInvalidMethodError as ApplyModuleInvalidMethodError,
)
from linnet.errors.linen import (
    ApplyScopeInvalidVariablesStructureError as ApplyScopeInvalidVariablesStructureError,
)
from linnet.errors.linen import (
    ApplyScopeInvalidVariablesTypeError as ApplyScopeInvalidVariablesTypeError,
)
from linnet.errors.linen import (
    AssignSubModuleError as AssignSubModuleError,
)
from linnet.errors.linen import (
    CallCompactUnboundModuleError as CallCompactUnboundModuleError,
)
from linnet.errors.linen import (
    CallSetupUnboundModuleError as CallSetupUnboundModuleError,
)
from linnet.errors.linen import (
    CallShareScopeOnUnboundModuleError as CallShareScopeOnUnboundModuleError,
)
from linnet.errors.linen import (
    CallUnbindOnUnboundModuleError as CallUnbindOnUnboundModuleError,
)
from linnet.errors.linen import (
    CursorFindError as CursorFindError,
)
from linnet.errors.linen import (
    DescriptorAttributeError as DescriptorAttributeError,
)
from linnet.errors.linen import (
    ImmutableVariableError as ImmutableVariableError,
)
from linnet.errors.linen import (
    IncorrectPostInitOverrideError as IncorrectPostInitOverrideError,
)
from linnet.errors.linen import (
    InvalidCheckpointError as InvalidCheckpointError,
)
from linnet.errors.linen import (
    InvalidFilterError as InvalidFilterError,
)
from linnet.errors.linen import (
    InvalidInstanceModuleError as InvalidInstanceModuleError,
)
from linnet.errors.linen import (
    InvalidRngError as InvalidRngError,
)
from linnet.errors.linen import (
    InvalidScopeError as InvalidScopeError,
)
from linnet.errors.linen import (
    JaxTransformError as JaxTransformError,
)
from linnet.errors.linen import (
    LazyInitError as LazyInitError,
)
from linnet.errors.linen import (
    ModifyScopeVariableError as ModifyScopeVariableError,
)
from linnet.errors.linen import (
    MPACheckpointingRequiredError as MPACheckpointingRequiredError,
)
from linnet.errors.linen import (
    MPARestoreDataCorruptedError as MPARestoreDataCorruptedError,
)
from linnet.errors.linen import (
    MPARestoreTargetRequiredError as MPARestoreTargetRequiredError,
)
from linnet.errors.linen import (
    MultipleMethodsCompactError as MultipleMethodsCompactError,
)
from linnet.errors.linen import (
    NameInUseError as NameInUseError,
)
from linnet.errors.linen import (
    PartitioningUnspecifiedError as PartitioningUnspecifiedError,
)
from linnet.errors.linen import (
    ReservedModuleAttributeError as ReservedModuleAttributeError,
)
from linnet.errors.linen import (
    ScopeCollectionNotFound as ScopeCollectionNotFound,
)
from linnet.errors.linen import (
    ScopeParamNotFoundError as ScopeParamNotFoundError,
)
from linnet.errors.linen import (
    ScopeParamShapeError as ScopeParamShapeError,
)
from linnet.errors.linen import (
    ScopeVariableNotFoundError as ScopeVariableNotFoundError,
)
from linnet.errors.linen import (
    SetAttributeFrozenModuleError as SetAttributeFrozenModuleError,
)
from linnet.errors.linen import (
    SetAttributeInModuleSetupError as SetAttributeInModuleSetupError,
)
from linnet.errors.linen import (
    TransformedMethodReturnValueError as TransformedMethodReturnValueError,
)
from linnet.errors.linen import (
    TransformTargetError as TransformTargetError,
)
from linnet.errors.linen import (
    TraverseTreeError as TraverseTreeError,
)
from linnet.errors.linen import (
    UnboundModuleError as UnboundModuleError,
)


def _show_here() -> None:
    """Programs import the classes from here, and tracebacks name them so."""
    for value in globals().values():
        if isinstance(value, type):
            value.__module__ = __name__


_show_here()
