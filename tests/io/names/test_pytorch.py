"""PyTorch's layers: names and layouts by hand and, where it is installed, the same outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from linnet import io, nnx
from linnet.errors import CheckpointMismatchError
from linnet.io import names


@nnx.jit
def outputs(model, *inputs):
    with jax.default_matmul_precision("highest"):
        return model(*inputs)


def images(x):
    """Channels last, as Linnet has them."""
    return np.moveaxis(x, 1, -1)


def bidirectional(rngs):
    forward, backward = (nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=rngs)) for _ in range(2))
    return nnx.Bidirectional(forward, backward)


class Tower(nnx.Module):
    """Modules in modules, lists, sequences, a stack and parameters of its own."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.blocks = nnx.Stack(functools.partial(nnx.Linear, 4, 4), 2, rngs=rngs)
        self.more = nnx.List(
            [nnx.Linear(4, 4, rngs=rngs), nnx.LayerNorm(4, epsilon=1e-5, rngs=rngs)]
        )
        self.head = nnx.Sequential(
            nnx.Linear(4, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 2, rngs=rngs)
        )
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, tokens):
        x = self.blocks(self.embed(tokens))
        for layer in self.more:
            x = layer(x)
        return self.head(x) * jnp.broadcast_to(self.scale[...], (*tokens.shape, 2))


# How to build the layer here, and the shapes that PyTorch stores for it.
LAYERS = {
    "Linear": (lambda r: nnx.Linear(2, 3, rngs=r), {"weight": (3, 2), "bias": (3,)}),
    "LinearGeneral": (
        lambda r: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=r),
        {"weight": (20, 6), "bias": (20,)},
    ),
    "Conv 1d": (lambda r: nnx.Conv(2, 3, 5, rngs=r), {"weight": (3, 2, 5), "bias": (3,)}),
    "Conv 2d in groups": (
        lambda r: nnx.Conv(4, 6, (3, 5), feature_group_count=2, rngs=r),
        {"weight": (6, 2, 3, 5), "bias": (6,)},
    ),
    "ConvTranspose": (
        lambda r: nnx.ConvTranspose(2, 4, (3, 5), rngs=r),
        {"weight": (2, 4, 3, 5), "bias": (4,)},
    ),
    "BatchNorm": (
        lambda r: nnx.BatchNorm(3, rngs=r),
        {"weight": (3,), "bias": (3,), "running_mean": (3,), "running_var": (3,)},
    ),
    "LayerNorm": (lambda r: nnx.LayerNorm(3, rngs=r), {"weight": (3,), "bias": (3,)}),
    "RMSNorm": (lambda r: nnx.RMSNorm(3, rngs=r), {"weight": (3,)}),
    "GroupNorm": (lambda r: nnx.GroupNorm(4, 2, rngs=r), {"weight": (4,), "bias": (4,)}),
    "PReLU": (lambda r: nnx.PReLU(), {"weight": (1,)}),
    "Embed": (lambda r: nnx.Embed(5, 3, rngs=r), {"weight": (5, 3)}),
    "MultiHeadAttention": (
        lambda r: nnx.MultiHeadAttention(2, 6, decode=False, rngs=r),
        {"in_proj_weight": (18, 6), "in_proj_bias": (18,), "out_proj.weight": (6, 6),
         "out_proj.bias": (6,)},
    ),
    "MultiHeadAttention of other keys": (
        lambda r: nnx.MultiHeadAttention(2, 6, in_kv_features=4, decode=False, rngs=r),
        {"q_proj_weight": (6, 6), "k_proj_weight": (6, 4), "v_proj_weight": (6, 4),
         "in_proj_bias": (18,), "out_proj.weight": (6, 6), "out_proj.bias": (6,)},
    ),
    "LSTMCell": (
        lambda r: nnx.LSTMCell(3, 4, rngs=r),
        {"weight_ih": (16, 3), "weight_hh": (16, 4), "bias_ih": (16,), "bias_hh": (16,)},
    ),
    "RNN of OptimizedLSTMCell": (
        lambda r: nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=r)),
        {"weight_ih_l0": (16, 3), "weight_hh_l0": (16, 4), "bias_ih_l0": (16,),
         "bias_hh_l0": (16,)},
    ),
    "GRUCell": (
        lambda r: nnx.GRUCell(3, 4, rngs=r),
        {"weight_ih": (12, 3), "weight_hh": (12, 4), "bias_ih": (12,), "bias_hh": (12,)},
    ),
    "LoRALinear": (
        lambda r: nnx.LoRALinear(2, 3, lora_rank=1, rngs=r),
        {"weight": (3, 2), "bias": (3,), "lora.lora_a": (2, 1), "lora.lora_b": (1, 3)},
    ),
    "Tower": (
        Tower,
        {"embed.weight": (7, 4), "blocks.0.weight": (4, 4), "blocks.0.bias": (4,),
         "blocks.1.weight": (4, 4), "blocks.1.bias": (4,), "more.0.weight": (4, 4),
         "more.0.bias": (4,), "more.1.weight": (4,), "more.1.bias": (4,), "head.0.weight": (6, 4),
         "head.0.bias": (6,), "head.2.weight": (2, 6), "head.2.bias": (2,), "scale": (2,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_layers_have_pytorchs_names_and_shapes_and_go_both_ways(case, tmp_path):
    make, shapes = LAYERS[case]
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name.startswith("bias_hh"):  # the model has one bias; see below
            tensor[...] = 0
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.numpy.save_file(tensors, theirs, {"format": "pt"})
    # Random streams are made with the model; what is loaded has to be abstract no longer.
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    for _, module in nnx.iter_modules(model):
        if hasattr(module, "rngs"):
            module.rngs = None
    io.load_safetensors(theirs, model, names.pytorch)
    io.save_safetensors(ours, model, names.pytorch)
    assert ours.read_bytes() == theirs.read_bytes()


def test_values_lie_where_pytorch_has_them(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "x.safetensors"
    weight = rng.normal(size=(18, 6)).astype(np.float32)
    out = rng.normal(size=(6, 6)).astype(np.float32)
    biases = {"in_proj_bias": np.arange(18, dtype=np.float32), "out_proj.bias": np.zeros(6, "f")}
    safetensors.numpy.save_file({"in_proj_weight": weight, "out_proj.weight": out, **biases}, path)
    model = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    io.load_safetensors(path, model, names.pytorch)
    np.testing.assert_array_equal(model.query.kernel[:, 1, 2], weight[5])
    np.testing.assert_array_equal(model.value.kernel[:, 0, 0], weight[12])
    np.testing.assert_array_equal(model.key.bias[...], [[6, 7, 8], [9, 10, 11]])
    np.testing.assert_array_equal(model.out.kernel[1, 2], out[:, 5])


def test_two_biases_are_added_up(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "weight_ih": np.zeros((16, 3), "f"),
        "weight_hh": np.zeros((16, 4), "f"),
        "bias_ih": np.arange(16, dtype="f"),
        "bias_hh": np.full(16, 100, "f"),
    }
    safetensors.numpy.save_file(tensors, path)
    cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
    io.load_safetensors(path, cell, names.pytorch)
    gates = [cell.hi, cell.hf, cell.hg, cell.ho]
    assert [gate.bias[0].item() for gate in gates] == [100, 104, 108, 112]


def test_a_gru_with_a_bias_that_has_no_place_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "weight_ih": np.zeros((12, 3), "f"),
        "weight_hh": np.zeros((12, 4), "f"),
        "bias_ih": np.ones(12, "f"),
        "bias_hh": np.ones(12, "f"),
    }
    safetensors.numpy.save_file(tensors, path)
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    before = np.asarray(cell.dense_i.kernel[...])
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(path, cell, names.pytorch)
    assert (
        "dense_i/bias: nnx.GRUCell has no bias of the hidden state inside the new state, and the "
        "last third of the second bias is not zero; write a cell of your own with that bias"
    ) in str(error.value)
    np.testing.assert_array_equal(cell.dense_i.kernel[...], before)
    tensors["bias_hh"][8:] = 0
    safetensors.numpy.save_file(tensors, path)
    io.load_safetensors(path, cell, names.pytorch)
    assert cell.dense_i.bias[...].tolist() == [2.0] * 8 + [1.0] * 4


def test_a_shared_layer_may_be_stored_under_either_name_or_both(tmp_path):
    class Shared(nnx.Module):
        def __init__(self):
            self.encoder = nnx.Embed(3, 2, rngs=nnx.Rngs(0))
            self.decoder = self.encoder

    path = tmp_path / "x.safetensors"
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    for stored in (["encoder"], ["decoder"], ["encoder", "decoder"]):
        model = Shared()
        safetensors.numpy.save_file({f"{name}.weight": weight for name in stored}, path)
        io.load_safetensors(path, model, names.pytorch)
        np.testing.assert_array_equal(model.decoder.embedding[...], weight)
    tensors = {"encoder.weight": weight, "decoder.weight": weight + 1}
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(CheckpointMismatchError, match=r"coder.weight: differs from .*coder"):
        io.load_safetensors(path, Shared(), names.pytorch)


def torch_pairs(nn):
    """For each case PyTorch's layer, Linnet's, and the input of PyTorch's."""

    def uniform(*shape):
        return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)

    class TorchTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.more = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
            self.head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
            self.scale = nn.Parameter(self.embed.weight.new_ones(2))

        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in [*self.blocks, *self.more]:
                x = layer(x)
            return self.head(x) * self.scale

    square, conv = uniform(2, 4, 6, 5), {"padding": "VALID"}
    lstm = functools.partial(nn.LSTM, 3, 4, batch_first=True)
    sequence = uniform(2, 5, 3)
    return {
        "Linear": (nn.Linear(3, 2), lambda r: nnx.Linear(3, 2, rngs=r), uniform(4, 3)),
        "Conv2d": (
            nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, groups=2),
            lambda r: nnx.Conv(4, 6, (3, 2), strides=2, padding=1, feature_group_count=2, rngs=r),
            square,
        ),
        "Conv1d": (
            nn.Conv1d(3, 2, 3), lambda r: nnx.Conv(3, 2, 3, **conv, rngs=r), uniform(2, 3, 7),
        ),
        "ConvTranspose2d": (
            nn.ConvTranspose2d(4, 3, (3, 2), stride=2),
            lambda r: nnx.ConvTranspose(4, 3, (3, 2), strides=2, **conv, rngs=r),
            square,
        ),
        "ConvTranspose2d, kernel transposed": (
            nn.ConvTranspose2d(4, 3, (3, 2), stride=2),
            lambda r: nnx.ConvTranspose(
                4, 3, (3, 2), strides=2, **conv, transpose_kernel=True, rngs=r
            ),
            square,
        ),
        "BatchNorm2d": (
            nn.BatchNorm2d(4),
            lambda r: nnx.BatchNorm(4, use_running_average=True, epsilon=1e-5, rngs=r),
            square,
        ),
        "GroupNorm": (
            nn.GroupNorm(2, 4),
            lambda r: nnx.GroupNorm(4, num_groups=2, epsilon=1e-5, rngs=r),
            square,
        ),
        "LayerNorm": (
            nn.LayerNorm(3), lambda r: nnx.LayerNorm(3, epsilon=1e-5, rngs=r), uniform(4, 3),
        ),
        "PReLU": (nn.PReLU(), lambda r: nnx.PReLU(), uniform(4, 3) - 0.5),
        "LSTM": (lstm(), lambda r: nnx.RNN(nnx.LSTMCell(3, 4, rngs=r)), sequence),
        "LSTM, fused": (lstm(), lambda r: nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=r)), sequence),
        "LSTM, both ways": (lstm(bidirectional=True), bidirectional, sequence),
        "GRU": (
            nn.GRU(3, 4, batch_first=True), lambda r: nnx.RNN(nnx.GRUCell(3, 4, rngs=r)), sequence,
        ),
        "RNN": (
            nn.RNN(3, 4, batch_first=True), lambda r: nnx.RNN(nnx.SimpleCell(3, 4, rngs=r)),
            sequence,
        ),
        "Tower": (TorchTower(), Tower, np.array([[1, 4, 6], [0, 0, 3]])),
    }  # fmt: skip


CASES = [
    "Linear", "Conv2d", "Conv1d", "ConvTranspose2d", "ConvTranspose2d, kernel transposed",
    "BatchNorm2d", "GroupNorm", "LayerNorm", "PReLU", "LSTM", "LSTM, fused", "LSTM, both ways",
    "GRU", "RNN", "Tower",
]  # fmt: skip


def randomized(torch, module):
    """A module in evaluation whose parameters and running statistics are no constants."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1 if "var" in name else
                             torch.randn_like(tensor) * 0.5)  # fmt: skip
            if isinstance(module, torch.nn.GRU) and name.startswith("bias_hh"):
                tensor[8:] = 0  # nnx.GRUCell has no such bias
    return module.eval()


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_pytorch(case, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    theirs, make, inputs = torch_pairs(torch.nn)[case]
    randomized(torch, theirs)
    save_file(theirs.state_dict(), tmp_path / "x.safetensors")
    model = make(nnx.Rngs(0))
    assert io.load_safetensors(tmp_path / "x.safetensors", model, names.pytorch).problems == []
    with torch.no_grad():
        wanted = theirs(torch.tensor(inputs))
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).numpy()
    is_image = case.startswith(("Conv", "BatchNorm", "GroupNorm"))
    found = outputs(model, images(inputs) if is_image else inputs)
    np.testing.assert_allclose(found, images(wanted) if is_image else wanted, atol=2e-6, rtol=1e-5)


def test_a_nest_of_arrays_in_a_variable_has_a_name_for_each(tmp_path):
    model = nnx.Dict(v=nnx.Variable({"p": jnp.ones(2), "q": [jnp.full(1, 3.0)]}))
    io.save_safetensors(tmp_path / "x.safetensors", model, names.pytorch)
    stored = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {name: x.tolist() for name, x in stored.items()} == {"v.p": [1, 1], "v.q.0": [3]}
    other = nnx.Dict(v=nnx.Variable({"p": jnp.zeros(2), "q": [jnp.zeros(1)]}))
    io.load_safetensors(tmp_path / "x.safetensors", other, names.pytorch)
    assert other.v["q"][0].tolist() == [3]


def test_attention_computes_what_pytorchs_does(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    x = np.random.default_rng(1).normal(size=(2, 5, 6)).astype(np.float32)
    theirs = randomized(torch, torch.nn.MultiheadAttention(6, 2, batch_first=True))
    save_file(theirs.state_dict(), tmp_path / "x.safetensors")
    model = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    io.load_safetensors(tmp_path / "x.safetensors", model, names.pytorch)
    with torch.no_grad():
        wanted = theirs(*[torch.tensor(x)] * 3)[0].numpy()
    np.testing.assert_allclose(outputs(model, x), wanted, atol=2e-6, rtol=1e-5)


def test_pytorch_loads_what_is_saved(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    model = Tower(nnx.Rngs(3))
    io.save_safetensors(tmp_path / "x.safetensors", model, names.pytorch)
    theirs, _, inputs = torch_pairs(torch.nn)["Tower"]
    theirs.load_state_dict(load_file(tmp_path / "x.safetensors"))
    with torch.no_grad():
        found = theirs(torch.tensor(inputs)).numpy()
    np.testing.assert_allclose(found, outputs(model, inputs), atol=2e-6, rtol=1e-5)
