"""Checkpoints: models, optimizers and plain values in a folder, written with Orbax, and back.

Saving (``saving.save``, or ``manager.Manager.save`` in the background):

1. ``saving.Saving`` flattens the items to leaves by path (``shared/objects.py``), refuses what
   cannot be stored, and builds the tree of arrays for Orbax.
2. ``prepare`` of ``shared/folders.py`` makes sure that nothing is overwritten unasked, and that
   there are permission and free space; a lock file keeps other processes out.
3. ``orbax.Writer`` copies the arrays; Orbax's background thread writes them to a temporary folder
   beside the final one (``.orbax-checkpoint-tmp`` in its name).
4. When all arrays are written, Orbax calls ``Saving.finish``: ``manifest.write`` takes checksums
   (CRC-32) of the files, flushes (fsync) them, except large ones of TensorStore, which has done
   that, and their folders, and then writes and flushes ``linnet.json``: the type of every entry,
   plain values, and those checksums.
5. Orbax adds its own metadata, which say that there is a manifest, so that a checkpoint whose
   ``linnet.json`` was deleted is reported as damaged, and renames the temporary folder. A save that
   may replace an older checkpoint (``overwrite=True``) writes the new one with the suffix
   ``.linnet-new``; ``folders.replace`` then renames the old one away and the new one into place.
   Either way the parent folder is flushed. With a ``Manager`` Orbax renames a new step in the
   background; its parent folder is flushed, and a replacement renamed, at the next save, ``wait``,
   ``restore`` or ``close``. ``Manager`` removes old checkpoints the same way: renamed first,
   deleted afterwards.

A process killed at any point thus leaves the old checkpoint, if there was one, or the new one,
complete, under the final name (between the two renames of step 5 the new one under
``.linnet-new``, which restoring finds), and at most a leftover besides, which
``folders.is_leftover`` knows. The first save of a ``Manager`` removes leftovers in its folder, and
a save with ``overwrite=True`` those of its own path (a hidden lock file, or an empty trial folder,
may stay; neither keeps anybody out). After a loss of power it is the same: a folder gets its final
name only when all that is restored from it is on the disk, and once a save has returned (or
``wait``, in the background) the name is there too. The checksums tell whether files were changed
since.

Restoring (``restoring.restore``, ``load_tree``, ``Manager.restore``):

1. ``sources.open_checkpoint`` finds out what the folder holds and, for Linnet's own, compares the
   checksums with the manifest (with ``verify=False`` the sizes alone). Other Orbax checkpoints and
   trees in memory are sources as well.
2. ``shared/matching.py`` compares the types of all stored entries with those of the items to
   restore into, and lists everything that does not fit; with ``strict=True`` nothing is written
   if anything is on that list.
3. The source reads what is needed; ``shared/placing.py`` gives values their dtype and sharding.
4. ``objects.write`` puts all values into the live objects at once.

Several processes save, and restore with a ``Manager``, together (``shared/processes.py``); with
``restore`` each works alone. Each process flattens its items, and what they found is compared; the
first one looks at the folder, removes leftovers, holds the lock, writes the manifest, renames, and
chooses the step to restore; each writes and reads its own shards. Orbax's barriers see to it that
no folder is renamed before all shards are in it, so that killing any one process leaves what
killing a single one would. An error in one process is raised in all.

Files: ``manifest`` (the file ``linnet.json``), ``orbax`` (the only one that calls Orbax),
``saving``, ``sources``, ``restoring``, ``linen`` (Linen's variables into NNX models), ``manager``
(the checkpoints of one run).
"""
