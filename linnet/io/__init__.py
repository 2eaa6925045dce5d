"""Checkpoints: models, optimizers and everything beside them to a folder and back.

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
from linnet.io.exporting import export as export
from linnet.io.exporting import load_exported as load_exported
from linnet.io.manager import Manager as Manager
from linnet.io.matching import Problem as Problem
from linnet.io.restoring import Restored as Restored
from linnet.io.restoring import load_tree as load_tree
from linnet.io.restoring import restore as restore
from linnet.io.saving import save as save
from linnet.io.weight_loading import load_safetensors as load_safetensors
from linnet.io.weight_saving import save_safetensors as save_safetensors
