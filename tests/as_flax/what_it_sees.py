"""What a program sees."""  # `python -m linnet` runs a copy of this file

import os
import sys

assert "jax" not in sys.modules  # the program may set things before it imports JAX
main = sys.modules["__main__"]
assert main.__dict__ is globals() and __name__ == "__main__" and __doc__ == "What a program sees."
assert __spec__ is None and __package__ is None and __file__ == sys.argv[1] and __cached__ is None
assert sys.argv == ["program.py", __file__, "--flag"] and sys.path[0] == os.path.dirname(__file__)

import importlib, importlib.metadata, importlib.util, inspect, pickle

assert importlib.util.find_spec("flax").name == "flax"
import flax

assert flax.__version__ == importlib.metadata.version("flax") == "0.12.8"
assert importlib.util.find_spec("flax.linen") and not importlib.util.find_spec("flax.nowhere")
assert importlib.util.find_spec("flax.nnx.nowhere") is None

import linnet
import flax.linen as nn
import flax.core.frozen_dict
from flax import nnx, struct, config
from flax.training import train_state
from flax.nnx.nn.linear import Linear
from flax.experimental import nnx as older
import flax.version, flax.configurations

assert linnet.__version__ != flax.__version__ == flax.version.__version__
assert nnx is flax.nnx is linnet.nnx is sys.modules["flax.nnx"] is sys.modules["linnet.nnx"]
assert nn is linnet.linen and nn.module is importlib.import_module("flax.linen.module")
assert nn.__name__ == nn.__spec__.name == "linnet.linen" and flax.__name__ == "flax"
assert config is linnet.config is flax.configurations and older.Linear is Linear is nnx.Linear
assert flax.core.FrozenDict is linnet.core.frozen_dict.FrozenDict
assert flax.training.checkpoints is linnet.training.checkpoints
assert repr(Linear) == "<class 'linnet.nnx.nn.linear.Linear'>"
assert {"nnx", "linen", "__version__"} <= set(dir(flax))
assert importlib.reload(flax.version).__name__ == "linnet.as_flax.version"


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = Linear(2, 3, rngs=rngs)


class Net(nn.Module):
    pass


def work(number):
    import flax

    return number + 1, flax.__version__, flax.nnx.Linear.__module__


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
        return type(error).__name__ + ": " + str(error)


for text, kind, want in [
    ("import flax.nowhere", "ModuleNotFoundError", "No module named 'flax.nowhere': Linnet has no"),
    ("from flax import nowhere", "ImportError", "module 'flax' has no attribute 'nowhere': Linnet"),
    ("from flax import io", "ImportError", "module 'flax' has no attribute 'io': Linnet has no"),
    ("flax.nowhere", "AttributeError", "module 'flax' has no attribute 'nowhere': Linnet has no"),
    ("from flax.nnx import Gone", "ImportError", "module 'linnet.nnx' has no attribute 'Gone': "),
    ("from flax.linen.linear import Gone", "ImportError", "module 'linnet.linen.linear' has no"),
    ("nn.linear.Gone", "AttributeError", "module 'linnet.linen.linear' has no attribute 'Gone': "),
    (
        "import flax.nnx.nn.linear.gone",
        "ModuleNotFoundError",
        "No module named 'flax.nnx.nn.linear",
    ),
]:
    assert error_of(text).startswith(f"{kind}: {want}"), (text, error_of(text))
assert "\nFix: python -m linnet --check" in error_of("nnx.Gone") and not hasattr(nnx, "Gone")

if __name__ == "__main__":
    import multiprocessing, subprocess

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, [1]) == [(2, "0.12.8", "linnet.nnx.nn.linear")]
    code = "import sys, flax, here_first; print(flax.__version__, sys.path[1:3])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    print(run.stdout)

    def fails():
        raise KeyError("the program's own")

    fails()
