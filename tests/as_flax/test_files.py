"""flax.io: functions on files. What is expected is what Flax does."""

import pytest

from linnet import as_flax
from linnet.as_flax import files
from linnet.errors import AlreadyExistsError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with files.GFile("a", "w") as file:
        file.write("hi")
    return tmp_path


def test_looking(folder):
    files.makedirs("x/y")
    files.makedirs("x/y")
    assert files.exists("a") and not files.exists("b")
    assert files.isdir("x") and not files.isdir("a")
    assert files.getsize("a") == 2
    assert sorted(files.listdir(".")) == sorted(files.glob("*")) == ["a", "x"]
    with files.GFile("a", "rb") as file:
        assert file.read() == b"hi"


@pytest.mark.parametrize("move", [files.copy, files.rename])
def test_copying_and_renaming(folder, move):
    move("a", "b")
    assert (folder / "b").read_text() == "hi"
    assert (folder / "a").exists() == (move is files.copy)
    (folder / "c").write_text("old")
    with pytest.raises(AlreadyExistsError, match='"c" is there'):
        move("b", "c")
    move("b", "c", overwrite=True)
    assert (folder / "c").read_text() == "hi"
    with pytest.raises(files.NotFoundError):
        move("missing", "d")


def test_removing(folder):
    (folder / "x").mkdir()
    files.remove("a")
    files.rmtree("x")
    assert files.listdir(".") == []
    for remove in (files.remove, files.rmtree, files.listdir, files.getsize):
        with pytest.raises(FileNotFoundError):
            remove("x")


def test_the_mode():
    assert files.io_mode is files.BackendMode.DEFAULT
    with files.override_mode(files.BackendMode.DEFAULT):
        files.set_mode(files.BackendMode.DEFAULT)
    with pytest.raises(ValueError, match=r"Python.s own functions on files, not .*TF\.\nFix: "):
        files.set_mode(files.BackendMode.TF)


def test_as_a_module_of_flax():
    with as_flax.installed():
        import flax.io
        from flax import io

        assert io is flax.io and io.exists is files.exists
