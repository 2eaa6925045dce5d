"""nnx.display: Treescope in notebooks and HTML files, text elsewhere."""

import sys
import types
from html.parser import HTMLParser

import jax.numpy as jnp
import pytest
import treescope

from linnet import nnx
from tests.subprocesses import run_program


class Inner(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 3)), names=("rows", "columns"))
        self.label = "a label"


class Model(nnx.Module):
    def __init__(self):
        self.inner = Inner()
        self.blocks = [nnx.BatchStat(jnp.zeros(2)), {"deep": nnx.List([Inner()])}]
        self.mapping = nnx.Dict(entry=nnx.Param(1.0))
        self.rngs = nnx.Rngs(0)
        self.itself = self


class Texts(HTMLParser):
    """The visible text of a page; fails where a tag is closed that was not opened."""

    VOID = ("meta", "br", "img", "input", "link", "hr")

    def __init__(self, page):
        super().__init__()
        self.open, self.found = [], []
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = "".join(self.found)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"}.intersection(self.open[-1:]):
            self.found.append(data)


@pytest.fixture
def page(tmp_path):
    """Writes objects to a page, under the path given as text or not, and reads it."""

    def write(*objects, as_text=False):
        file = tmp_path / "page.html"
        assert nnx.display(*objects, file=str(file) if as_text else file) is None
        return file.read_text(encoding="utf-8")

    return write


# ---- pages --------------------------------------------------------------------------------------

MODEL_NAMES = "inner kernel names rows columns label blocks deep mapping entry rngs default itself"


@pytest.mark.parametrize("as_text", [True, False], ids=["str", "Path"])
def test_a_page_shows_a_model(page, as_text):
    html = page(Model(), as_text=as_text)
    assert html.startswith('<!doctype html>\n<html><head><meta charset="utf-8">')
    text = Texts(html).text
    for name in [*MODEL_NAMES.split(), "Model", "Inner", "Param", "BatchStat", "List", "Dict"]:
        assert name in text
    assert "# BatchStat: 2 (8 B), Param: 12 (48 B), RngState: 2 (12 B), Total: 16 (68 B)" in text
    assert "# 6 (24 B)" in text
    assert "float32(2, 3)" in text
    assert "cyclic reference to Model" in text
    assert "http" not in text


def shown(value):
    return {
        "Variable": (value.inner.kernel, ["Param", "value", "names", "columns"]),
        "state": (nnx.state(value.inner), ["State", "'kernel'", "Param", "columns"]),
        "flat state": (nnx.state(value.inner).flat_state(), ["FlatState", "('kernel',)"]),
        "graphdef": (nnx.graphdef(value), ["GraphDef", *MODEL_NAMES.split()]),
        "graph state": (nnx.unpack(value.inner), ["GraphState", "kernel"]),
        "rngs": (value.rngs, ["Rngs", "RngStream", "RngKey", "RngCount", "# RngState: 2 (12 B)"]),
        "abstract model": (nnx.eval_shape(Inner), ["Inner", "ShapeDtypeStruct", "# 6 (24 B)"]),
        "ref": (nnx.Variable(jnp.ones(2), ref=True), ["Variable", "ref", "True"]),
        "no value": (nnx.Variable(None), ["Variable", "None"]),
        "list": ([value.inner, 3], ["Inner", "kernel", "3"]),
        "anything": ({"plain": (1, "text")}, ["plain", "text"]),
    }


@pytest.mark.parametrize("kind", shown(Model()))
def test_a_page_shows_anything(page, kind):
    value, names = shown(Model())[kind]
    text = Texts(page(value)).text
    assert [name for name in names if name not in text] == []


def test_a_page_shows_several_objects_in_order(page):
    model = Model()
    text = Texts(page(*nnx.split(model), model.inner)).text
    places = [text.index(name) for name in ("GraphDef(", "State(", "# Param: 6 (24 B)")]
    assert places == sorted(places)
    assert Texts(page()).text.strip() == ""


# ---- notebooks and elsewhere --------------------------------------------------------------------


def test_plain_text_elsewhere(capsys):
    model = Model()
    nnx.display(model, model.inner.kernel, 3)
    assert capsys.readouterr().out == f"{model!r}\n{model.inner.kernel!r}\n3\n"


def fake_ipython(monkeypatch, config):
    shell = types.SimpleNamespace(config=config)
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)


def test_treescope_in_a_notebook(monkeypatch, capsys):
    displayed = []
    fake_ipython(monkeypatch, {"IPKernelApp": {}})
    monkeypatch.setattr(treescope, "display", displayed.append)
    model = Model()
    nnx.display(model, 3)
    assert displayed == [model, 3]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("config", [{}, {"TerminalIPythonApp": {}}], ids=str)
def test_plain_text_in_a_terminal_of_ipython(monkeypatch, capsys, config):
    fake_ipython(monkeypatch, config)
    nnx.display(3)
    assert capsys.readouterr().out == "3\n"


def test_treescope_renders_the_same_names_as_text():
    text = treescope.render_to_text(Model().inner)
    assert text.startswith("Inner(\n  kernel=Param(\n    value=# jax.Array float32(2, 3)")
    assert text.endswith("label='a label',\n)  # Param: 6 (24 B)")


def test_treescope_is_loaded_when_it_is_used():
    program = """
        import sys
        from linnet import nnx
        nnx.display(nnx.Param(1.0))
        assert "treescope" not in sys.modules and "IPython" not in sys.modules
    """
    run = run_program(program)
    assert (run.stderr, run.stdout) == ("", "Param(\n  value=1.0\n)\n")
