"""Storage: checkpoints, weights in safetensors files, and exported programs.

- ``checkpoint/``: ``save``, ``restore``, ``load_tree``, ``Manager``; its docstring tells how a
  checkpoint is made durable; ``load_linen`` and ``linen_variables`` for models of Linen;
- ``weights/``: ``load_safetensors``, ``save_safetensors``, with the maps of ``names/``;
- ``exporting.py``: ``export``, ``load_exported``; ``exported.py`` is copied into each export;
- ``shared/``: what these have in common.

Example:
  >>> import tempfile
  >>> from linnet import io, nnx
  >>> folder = tempfile.mkdtemp()
  >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  >>> io.save(f"{folder}/best", model=model, note="small")
  >>> io.restore(f"{folder}/best", model=model).note
  'small'
"""

from linnet.io import names as names
from linnet.io.checkpoint.linen import linen_variables as linen_variables, load_linen as load_linen
from linnet.io.checkpoint.manager import Manager as Manager
from linnet.io.checkpoint.restoring import load_tree as load_tree, restore as restore
from linnet.io.checkpoint.saving import save as save
from linnet.io.exporting import export as export, load_exported as load_exported
from linnet.io.shared.matching import Problem as Problem
from linnet.io.shared.objects import Restored as Restored
from linnet.io.weights.loading import load_safetensors as load_safetensors
from linnet.io.weights.saving import save_safetensors as save_safetensors
