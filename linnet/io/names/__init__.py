"""Maps between the names of stored tensors and the paths of a model.

``gpt2``, ``llama`` and ``vit`` are for files in the layout of Hugging Face's models, ``timm_vit``
for timm's, and ``pytorch`` for any model whose layers have the names of a PyTorch model's. A map of
your own is a list of rules. (``rules.py`` has rules, maps and the arrangement of axes;
``applying.py`` applies a map to a model; ``architectures.py`` and ``pytorch.py`` have the maps.)

Example:
  >>> from linnet.io import names
  >>> my_map = names.NameMap([
  ...     names.Rule("tok.weight", "embed/embedding"),
  ...     names.Rule("layers.*.fc.weight", "layers/*/fc/kernel", "out in -> in out"),
  ...     names.Rule("layers.*.qkv.weight",
  ...                ["layers/*/query/kernel", "layers/*/key/kernel", "layers/*/value/kernel"],
  ...                "(head dim)+ width -> width head dim"),
  ... ])
"""

from linnet.io.names.architectures import (
    gpt2 as gpt2,
    llama as llama,
    timm_vit as timm_vit,
    vit as vit,
)
from linnet.io.names.pytorch import pytorch as pytorch
from linnet.io.names.rules import NameMap as NameMap, Rule as Rule
