"""What a program sees."""  # `python -m linnet` runs a copy of this file

import os
import sys

if __name__ == "__main__":
    assert "jax" not in sys.modules  # the program may set things before it imports JAX
    main = sys.modules["__main__"]
    assert main.__dict__ is globals() and __doc__ == "What a program sees."
    assert __spec__ is None and __package__ is None and __cached__ is None
    assert sys.argv == ["program.py", __file__, "--flag"]
    assert sys.path[0] == os.path.dirname(__file__)

import flax
import flax.configurations
import flax.core.frozen_dict
import flax.linen as nn
import flax.version
import importlib
import importlib.metadata
import importlib.util
import inspect
import linnet
import multiprocessing
import pickle
import subprocess
from flax import config, nnx
from flax.experimental import nnx as older
from flax.nnx.nn.linear import Linear
from flax.training import train_state


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = Linear(2, 3, rngs=rngs)


def work(number):
    import flax

    return number + 1, flax.__version__, flax.nnx.Linear.__module__


def versions_and_specs():
    assert flax.__version__ == importlib.metadata.version("flax") == "0.12.8"
    assert linnet.__version__ != flax.__version__ == flax.version.__version__
    assert importlib.util.find_spec("flax").name == "flax"
    assert importlib.util.find_spec("flax.linen") and not importlib.util.find_spec("flax.nowhere")
    assert importlib.util.find_spec("flax.nnx.nowhere") is None
    assert {"nnx", "linen", "__version__"} <= set(dir(flax))
    assert importlib.reload(flax.version).__name__ == "linnet.as_flax.version"


def one_set_of_modules_and_classes():
    assert nnx is flax.nnx is linnet.nnx is sys.modules["flax.nnx"] is sys.modules["linnet.nnx"]
    assert nn is linnet.linen and nn.module is importlib.import_module("flax.linen.module")
    assert nn.__name__ == nn.__spec__.name == "linnet.linen" and flax.__name__ == "flax"
    assert config is linnet.config is flax.configurations and older.Linear is Linear is nnx.Linear
    assert flax.core.FrozenDict is linnet.core.frozen_dict.FrozenDict
    assert flax.training.checkpoints is linnet.training.checkpoints
    assert train_state.TrainState is linnet.training.train_state.TrainState
    assert repr(Linear) == "<class 'linnet.nnx.nn.linear.Linear'>"


def pickles_and_inspect():
    model = pickle.loads(pickle.dumps(Model(nnx.Rngs(0))))
    assert type(model) is Model and isinstance(model.layer, flax.nnx.Linear)
    assert Model.__module__ == "__main__" and inspect.getmodule(Model) is main
    assert inspect.getmodule(work) is main and "flax.__version__" in inspect.getsource(work)
    assert inspect.getmodule(Linear) is inspect.getmodule(Linear.__call__) is nnx.nn.linear
    assert pickle.dumps(Linear).count(b"linnet.nnx.nn.linear") == 1


def error_of(text):
    try:
        exec(text)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def missing_names():
    flax_lacks, linear = "module 'flax' has no attribute", "module 'linnet.linen.linear' has no"
    for text, kind, want in [
        (
            "import flax.nowhere",
            "ModuleNotFoundError",
            "No module named 'flax.nowhere': Linnet has",
        ),
        ("from flax import nowhere", "ImportError", f"{flax_lacks} 'nowhere': Linnet has no flax."),
        ("from flax import optim", "ImportError", f"{flax_lacks} 'optim': Linnet has no flax.opt"),
        ("flax.nowhere", "AttributeError", f"{flax_lacks} 'nowhere': Linnet has no flax.nowhere,"),
        (
            "from flax.nnx import Gone",
            "ImportError",
            "module 'linnet.nnx' has no attribute 'Gone': ",
        ),
        ("from flax.linen.linear import Gone", "ImportError", f"{linear} attribute 'Gone': Linnet"),
        (
            "nn.linear.Gone",
            "AttributeError",
            f"{linear} attribute 'Gone': Linnet has no flax.linen.",
        ),
        ("import flax.nnx.nn.linear.gone", "ModuleNotFoundError", "No module named 'flax.nnx.nn."),
    ]:
        assert error_of(text).startswith(f"{kind}: {want}"), (text, error_of(text))
    assert "\nFix: python -m linnet --check" in error_of("nnx.Gone")
    assert not hasattr(nnx, "Gone")


def child_processes():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, [1]) == [(2, "0.12.8", "linnet.nnx.nn.linear")]
    code = "import sys, flax, here_first; print(flax.__version__, sys.path[1:3])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    print(run.stdout)


def fails():
    raise KeyError("the program's own")


if __name__ == "__main__":
    versions_and_specs()
    one_set_of_modules_and_classes()
    pickles_and_inspect()
    missing_names()
    child_processes()
    fails()
