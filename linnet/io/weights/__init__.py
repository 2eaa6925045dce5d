"""Weights in the safetensors format, of other tools and for them.

Loading (``loading.load_safetensors``): ``files.open_tensors`` opens a file, or an index with its
files, and ``header.parse`` reads their headers without trust; the tensors are matched with the
entries of the model by path, or by a map of names (``linnet.io.names``); all types are compared and
every misfit is listed; then the tensors are read one at a time and placed on their devices; at last
all values are written into the model at once.

Saving (``saving.save_safetensors``): names and types of all tensors are settled first; then
``files.write`` writes them one at a time to temporary files, flushes these (fsync) and renames
them, the index last.
"""
