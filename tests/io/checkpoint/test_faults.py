"""Full disks, read-only folders, damage, other tools and other processes: what is said and kept."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import bits, names_in
from programs import environment, run

from linnet import io
from linnet.errors import (
    CheckpointBusyError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    NotACheckpointError,
)
from linnet.io.checkpoint import manifest
from linnet.io.shared import folders
from tests.models import OneOfEverything, disk_full

NOBODY = 65534

# When one write of several fails, TensorStore tells of the others after Orbax stopped listening.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def good(tmp_path):
    """A folder with one whole checkpoint."""
    io.save(tmp_path / "1", x=jnp.arange(5000.0), note="good")
    return tmp_path


def check_good(folder):
    assert io.restore(folder / "1", x=...).x.tolist() == list(range(5000))


# ---- writing ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("announced", [True, False])
def test_a_full_disk(small_disk, monkeypatch, announced):
    io.save(small_disk / "1", x=jnp.arange(5000.0))
    if not announced:  # a quota, say: the disk seems to have room until it is written to
        usage = shutil.disk_usage(small_disk)._replace(free=1 << 40)
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointWriteError) as caught:
        io.save(small_disk / "2", x=jnp.ones(500_000))
    assert caught.value.errno == errno.ENOSPC
    lines = str(caught.value).splitlines()
    assert lines == [
        f"The checkpoint {small_disk / '2'} could not be written: No space left on device.",
        f"The last checkpoint, {small_disk / '1'}, is as it was.",
        "Fix: make room on the disk, or save somewhere else.",
    ]
    assert names_in(small_disk) == ["1"]
    check_good(small_disk)
    io.save(small_disk / "3", x=jnp.arange(5000.0))


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_while_a_manager_saves(small_disk, monkeypatch, background):
    usage = shutil.disk_usage(small_disk)._replace(free=1 << 40)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    with io.Manager(small_disk, background=background) as manager:
        manager.save(1, x=jnp.arange(5000.0))
        with pytest.raises(CheckpointWriteError) as caught:
            manager.save(2, x=jnp.ones(500_000))
            manager.wait()
        assert str(caught.value).splitlines()[1] == (
            f"The last checkpoint, {small_disk / '1'}, is as it was."
        )
        assert manager.latest() == 1
        manager.save(3, x=jnp.arange(5000.0))
        assert manager.restore(x=...).step == 3
    assert names_in(small_disk) == ["1", "3"]


def test_a_disk_that_fills_up_at_the_very_end(good, monkeypatch):
    monkeypatch.setattr(manifest.os, "fsync", disk_full)
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        io.save(good / "2", x=1)
    with pytest.raises(CheckpointWriteError, match=r"The last checkpoint, .*1, is as it was"):
        io.save(good / "1", x=1, overwrite=True)
    assert names_in(good) == ["1"]
    check_good(good)


def test_all_that_is_restored_is_flushed_before_the_manifest(tmp_path, monkeypatch):
    flushed, large = [], 1 << 18  # bytes: TensorStore flushes such files itself
    real = manifest.write_through

    def write_through(path, data):
        folder = Path(path).parent
        for below in folder.rglob("*"):
            late = below.name in ("_CHECKPOINT_METADATA", "commit_success.txt")
            assert late or str(below) in flushed or below.stat().st_size >= large
        flushed.append("all")
        real(path, data)

    monkeypatch.setattr(manifest, "flush_path", lambda path: flushed.append(str(path)))
    monkeypatch.setattr(manifest, "write_through", write_through)
    io.save(tmp_path / "last", model=OneOfEverything(), x=np.zeros(1 << 17))
    assert "all" in flushed
    assert any(Path(path).name == "d" for path in flushed)  # the folders of TensorStore
    assert not flushed[-1].endswith("d")  # the folder of the manifest comes last


def test_folders_made_on_the_way_are_flushed_in_those_above(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(folders, "flush_folder", lambda folder: flushed.append(str(folder)))
    io.save(tmp_path / "a" / "b" / "last", x=1)
    wanted = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert flushed[:3] == wanted
    flushed.clear()
    io.save(tmp_path / "a" / "b" / "next", x=1)
    assert set(flushed) == {wanted[2]}


@pytest.mark.parametrize(("number", "is_reported"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_folder_that_cannot_be_flushed(good, monkeypatch, number, is_reported):
    """A disk that fails is reported; a file system that flushes files alone is not."""
    real = os.fsync

    def fsync(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat(good)):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    outcome = pytest.raises(CheckpointWriteError) if is_reported else contextlib.nullcontext()
    with outcome as caught:
        io.save(good / "2", x=1)
    if caught:
        assert str(caught.value).splitlines()[0] == (
            f"The checkpoint {good / '2'} could not be written: Input/output error."
        )
    with outcome, io.Manager(good) as manager:
        manager.save(3, x=1)
        manager.wait()


LIMITED = """
import resource, sys
import jax.numpy as jnp
from linnet import io
from linnet.errors import CheckpointWriteError

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    io.save(sys.argv[1] + "/2", x=jnp.ones(500_000))
except CheckpointWriteError as error:
    print(error)
"""


def test_a_limit_on_the_size_of_files(good):
    out = run(LIMITED, good).stdout.splitlines()
    assert out == [
        f"The checkpoint {good / '2'} could not be written: File too large.",
        f"The last checkpoint, {good / '1'}, is as it was.",
        "Fix: raise the limit on the size of a file (ulimit -f).",
    ]
    assert names_in(good) == ["1"]
    check_good(good)


@contextlib.contextmanager
def read_only(folder):
    """A folder that cannot be written to, not by root either."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_a_read_only_folder():
    # Not below pytest's own folder, which only its owner may enter.
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        io.save(place / "1", x=jnp.arange(5000.0))
        check_good(place)  # what is imported late has to be there before nobody comes
        with read_only(place):
            for save in (
                lambda: io.save(place / "2", x=1),
                lambda: io.Manager(place).save(2, x=1),
                lambda: io.save(place / "below" / "2", x=1),
            ):
                with pytest.raises(CheckpointWriteError) as caught:
                    save()
                assert caught.value.errno == errno.EACCES
                assert "could not be written: Permission denied." in str(caught.value)
                assert "Fix: save to a folder that you may write to" in str(caught.value)
            check_good(place)
        assert names_in(place) == ["1"]


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"could not be written: .*(exists|directory)"):
        io.save(tmp_path / "file" / "1", x=1)


def test_places_that_are_no_folders_are_refused():
    with pytest.raises(CheckpointWriteError, match="are folders of a file system, but got 'gs:"):
        io.save("gs://bucket/run", x=1)


# ---- damage -------------------------------------------------------------------------------------


def files(checkpoint):
    unchecked = ("commit_success.txt", "_CHECKPOINT_METADATA")
    found = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return [path for path in found if path.name not in unchecked]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def lose(path):
    path.unlink()


def link(path):
    """The same bytes, but outside of the folder."""
    outside = path.parents[path.parts[::-1].index("2")].parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("harm", [truncate, flip, lose, link])
def test_every_damaged_file_is_noticed_and_a_whole_checkpoint_offered(good, harm):
    model = OneOfEverything(3)
    io.save(good / "2", model=model, note="x")
    target = OneOfEverything(5)
    before = bits(target)
    for path in files(good / "2"):
        is_manifest = path.name == folders.MANIFEST
        if is_manifest and harm is link:
            continue  # which is harmless
        shutil.copytree(good / "2", good / "copy")
        harm(path)
        with pytest.raises(DamagedCheckpointError) as caught:
            io.restore(good / "2", model=target)
        text = str(caught.value)
        name = path.name if is_manifest else path.relative_to(good / "2").as_posix()
        assert name in text and str(good / "2") in text
        assert text.splitlines()[-1].startswith("Fix: restore ")
        assert bits(target) == before
        shutil.rmtree(good / "2")
        (good / "copy").rename(good / "2")
        with contextlib.suppress(FileNotFoundError):
            (good / "outside").unlink()
    io.restore(good / "2", model=target)
    assert bits(target) == bits(model)


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"verify": False}])
def test_without_its_manifest_a_checkpoint_is_damaged(good, options):
    io.save(good / "2", x=jnp.arange(3.0), pair=(1, 2), data=b"bytes", large=2**70, text="kept")
    (good / "2" / "linnet.json").unlink()
    with pytest.raises(DamagedCheckpointError) as caught:
        io.restore(good / "2", **options)
    assert str(caught.value) == (
        f"The checkpoint {good / '2'} is damaged: linnet.json is not there, which alone holds "
        "checksums, containers, ties, positions of iterators, and values that Orbax cannot hold.\n"
        f"Fix: restore {good / '1'}, which is whole. What Orbax can read of it: io.load_tree("
        "orbax.checkpoint.PyTreeCheckpointer().restore(path), model=model)."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax advises to give a sharding
        tree = ocp.PyTreeCheckpointer().restore(good / "2")
    assert set(tree) == {"x", "pair", "text"}
    assert io.load_tree(tree, x=jnp.zeros(3), text="").x.tolist() == [0, 1, 2]


def test_a_manager_passes_over_a_checkpoint_without_its_manifest(good):
    with io.Manager(good) as manager:
        manager.save(2, x=jnp.ones(5000), note="lost")
    (good / "2" / "linnet.json").unlink()
    with io.Manager(good) as manager:
        assert manager.steps() == [1]
        with pytest.warns(DamagedCheckpointWarning, match=r"2 is damaged and passed over; step 1"):
            assert manager.latest() == 1
        with pytest.warns(DamagedCheckpointWarning, match=r"linnet\.json is not there"):
            assert manager.restore(x=...).note == "good"
        with pytest.raises(DamagedCheckpointError, match=r"linnet\.json is not there"):
            manager.restore(2)


@pytest.mark.parametrize("metadata", ['{"custom_metadata": {}}', "[", "[]", None])
def test_what_nobody_says_had_a_manifest_is_a_checkpoint_of_orbax(good, metadata):
    (good / "1" / "linnet.json").unlink()
    file = good / "1" / "_CHECKPOINT_METADATA"
    file.unlink() if metadata is None else file.write_text(metadata)
    assert io.restore(good / "1").note == "good"


def test_sizes_alone_are_compared_when_told(good):
    flip(max(files(good / "1"), key=lambda path: path.stat().st_size))
    assert io.restore(good / "1", verify=False).note == "good"
    with pytest.raises(DamagedCheckpointError, match="its checksum differs"):
        io.restore(good / "1")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b'"version":1', b'"version":9', "version 9; this version of Linnet reads .* up to 1"),
        (b'"shape":[5000]', b'"shape":[-500]', "-500 is no size"),
        (b'"shape":[5000]', b'"shape":[1e99]', "1e\\+99 is no size"),
        (b'"shape":[5000]', b'"shape":[99999999999]', "larger than the files that hold them"),
        (b'"dtype":"float32"', b'"dtype":"floaty"', "cannot be read: .*floaty"),
        (b'"is":"array"', b'"is":"trick"', "'trick' is not allowed here"),
        (b'"path":["x"]', b'"path":[[]]', "is no path"),
        (b'"path":["note"]', b'"path":["x","y"]', "a value at x and another one below it, at x/y"),
        (b'"_METADATA"', b'"../evil"', "'../evil' is not inside the checkpoint"),
        (b'"_METADATA"', b'"/etc/passwd"', "'/etc/passwd' is not inside the checkpoint"),
        (b'"entries":[', b'"entries":[' + b"[" * 100_000, "cannot be read"),
        (b'"good"', b'{"pickle": "x"}', "where a value should be"),
        (b'"good"', b'{"bytes": "?"}', "where a value should be"),
    ],
)
def test_a_manifest_that_was_made_up_is_refused(good, old, new, text):
    path = good / "1" / folders.MANIFEST
    body = path.read_bytes().partition(b',"manifest":')[2].removesuffix(b"}\n")
    assert old in body
    body = body.replace(old, new)
    path.write_bytes(b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body))
    with pytest.raises(DamagedCheckpointError, match=text):
        io.restore(good / "1")


def test_a_manifest_that_is_too_large_is_not_read(good, monkeypatch):
    monkeypatch.setattr(manifest, "_LARGEST", 100)
    with pytest.raises(DamagedCheckpointError, match="is larger than any manifest"):
        io.restore(good / "1")


def test_an_unfinished_checkpoint(good):
    shutil.move(good / "1", good / "2.orbax-checkpoint-tmp")
    (good / "2.orbax-checkpoint-tmp" / folders.MANIFEST).unlink()
    io.save(good / "1", x=jnp.arange(5000.0))
    with pytest.raises(DamagedCheckpointError, match="was not finished") as caught:
        io.restore(good / "2.orbax-checkpoint-tmp")
    assert f"Fix: restore {good / '1'}, which is whole." in str(caught.value)


def test_a_checkpoint_that_was_being_replaced(good):
    """A process may end between the two renames; the new one is then found."""
    io.save(good / "2", x=2)
    shutil.move(good / "2", good / "1.linnet-new")
    shutil.move(good / "1", good / "1.linnet-removed")
    assert io.restore(good / "1").x == 2
    io.save(good / "1", x=3, overwrite=True)
    assert io.restore(good / "1").x == 3
    assert names_in(good) == ["1"]


def test_a_manager_finds_a_checkpoint_that_was_being_replaced(good):
    with io.Manager(good) as manager:
        manager.save(1, x=2, score=0.5, overwrite=True)
    shutil.move(good / "1", good / "1.linnet-new")
    manager = io.Manager(good)
    assert manager.steps() == [1] and manager.latest() == 1 and manager.best() == 1
    assert manager.restore().x == manager.restore(1).x == 2


# ---- other things in the place of a checkpoint --------------------------------------------------


def test_nothing_there(good):
    with pytest.raises(CheckpointNotFoundError) as caught:
        io.restore(good / "7")
    assert str(caught.value) == (
        f"There is no checkpoint {good / '7'}.\nFix: restore {good / '1'}, which is whole."
    )


OURS = "\nFix: name a folder that io.save or Orbax wrote."
TENSORS = "\nFix: safetensors files are read by io.load_safetensors."


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ([], f"It is empty.{OURS}"),
        (
            ["config.json", "model.safetensors"],
            f"It holds weights in the safetensors format.{TENSORS}",
        ),
        (["pytorch_model.bin"], f"It holds weights that PyTorch saved.{TENSORS}"),
        (["checkpoint.ckpt.index"], f"It holds a TensorFlow checkpoint.{TENSORS}"),
        (["10", "20"], "It holds the checkpoints 10, 20.\nFix: name one of them."),
        (["a.txt", "b.txt"], f"It holds a.txt, b.txt.{OURS}"),
    ],
)
def test_a_folder_of_another_tool(tmp_path, inside, text):
    place = tmp_path / "other"
    place.mkdir()
    for name in inside:
        (place / name).write_bytes(b"")
    with pytest.raises(NotACheckpointError) as caught:
        io.restore(place, x=...)
    assert str(caught.value) == f"{place} is not a checkpoint of Linnet or Orbax. {text}"


def test_a_file_of_another_tool(tmp_path):
    (tmp_path / "weights.msgpack").write_bytes(b"")
    with pytest.raises(NotACheckpointError, match=r"msgpack bytes; see .*load_tree"):
        io.restore(tmp_path / "weights.msgpack")


def test_a_folder_that_orbax_cannot_read(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "_METADATA").write_text("no json")
    with pytest.raises(DamagedCheckpointError, match=r"Orbax cannot read .*a: "):
        io.restore(tmp_path / "a")


# ---- two processes ------------------------------------------------------------------------------

HOLDER = """
import sys
import jax.numpy as jnp
from linnet import io

with io.Manager(sys.argv[1]) as manager:
    manager.save(5, x=jnp.zeros(3))
    manager.wait()
    print("saved", flush=True)
    sys.stdin.read()
"""


def test_two_processes_saving_to_one_folder(good):
    other = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(good)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert other.stdout.readline() == "saved\n"
        manager = io.Manager(good)
        with pytest.raises(CheckpointBusyError) as caught:
            manager.save(6, x=1)
        assert str(caught.value).splitlines() == [
            f"{good} is being saved to by another process (process {other.pid} on "
            f"{os.uname().nodename}).",
            "Fix: give each run a folder of its own, or end the other one first.",
        ]
        assert manager.latest() == 5
        check_good(good)
    finally:
        other.kill()
        other.communicate()
    manager.save(6, x=1)  # whoever held the folder is gone
    manager.close()
    assert names_in(good) == ["1", "5", "6"]


SAVER = """
import sys
import numpy as np
from linnet import io
from linnet.errors import CheckpointBusyError, CheckpointExistsError

mine = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    try:
        io.save(sys.argv[1], x=np.full(300_000, mine), overwrite=True)
    except (CheckpointBusyError, CheckpointExistsError) as error:
        print(type(error).__name__)
"""


def test_two_processes_saving_one_checkpoint_at_the_same_time(tmp_path):
    path = tmp_path / "shared"
    command = [sys.executable, "-W", "ignore", "-c", SAVER, str(path)]
    savers = [
        subprocess.Popen(
            [*command, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for number in (1, 2)
    ]
    for saver in savers:
        assert saver.stdout.readline() == "ready\n"
    for saver in savers:
        saver.stdin.write("go\n")
        saver.stdin.flush()
    for saver in savers:
        out, errors = saver.communicate()
        assert saver.returncode == 0, errors
        assert set(out.split()) <= {"CheckpointBusyError"}
    x = io.restore(path).x
    assert x.shape == (300_000,) and np.unique(x).tolist() in ([1], [2])
    assert names_in(tmp_path) == ["shared"]


def test_two_threads_saving_one_checkpoint(good):
    lock = folders.locked(str(good / ".2.linnet-lock"), str(good / "2"))
    busy = pytest.raises(CheckpointBusyError, match="by another thread of this process")
    with lock, busy:
        io.save(good / "2", x=1)
    io.save(good / "2", x=1)


ENDS = """
import sys
import jax.numpy as jnp
from linnet import io

manager = io.Manager(sys.argv[1])
manager.save(1, x=jnp.ones(2_000_000))
"""


def test_a_program_that_ends_at_once_still_has_its_checkpoint(tmp_path):
    run(ENDS, tmp_path)
    assert names_in(tmp_path) == ["1"]
    assert io.restore(tmp_path / "1").x.shape == (2_000_000,)
