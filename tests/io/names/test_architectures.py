"""The shipped maps: files with the real names and layouts, models checked against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import safetensors.numpy
from architectures import GPT2, Llama, ViT

from linnet import io, nnx
from linnet.errors import CheckpointMismatchError, NameMapError
from linnet.io import names

VOCAB, POSITIONS, WIDTH, HEADS, KV_HEADS, HIDDEN, DEPTH = 11, 8, 24, 6, 2, 20, 2
SIZE, PATCH, CHANNELS, LABELS = 8, 4, 3, 5
TOKENS = np.array([[1, 5, 2, 7, 3], [4, 4, 9, 0, 10]])
IMAGES = np.random.default_rng(1).normal(size=(2, CHANNELS, SIZE, SIZE)).astype(np.float32)


def gpt2_file(prefix=""):
    tensors = references.random_tensors(
        references.gpt2_shapes(VOCAB, POSITIONS, WIDTH, DEPTH, prefix)
    )
    wanted = references.gpt2(tensors, TOKENS, HEADS, DEPTH, prefix)
    return tensors, wanted


def make_gpt2(**options):
    return GPT2(VOCAB, POSITIONS, WIDTH, HEADS, DEPTH, rngs=nnx.Rngs(0), **options)


def llama_file(*, tied=False):
    shapes = references.llama_shapes(VOCAB, WIDTH, HEADS, KV_HEADS, HIDDEN, DEPTH, tied=tied)
    tensors = references.random_tensors(shapes)
    return tensors, references.llama(tensors, TOKENS, HEADS, KV_HEADS, DEPTH)


def make_llama(**options):
    return Llama(VOCAB, WIDTH, HEADS, KV_HEADS, HIDDEN, DEPTH, rngs=nnx.Rngs(0), **options)


def vit_file(*, timm=False):
    shapes = references.vit_shapes(SIZE, PATCH, CHANNELS, WIDTH, HIDDEN, DEPTH, LABELS)
    tensors = references.random_tensors(shapes)
    wanted = references.vit(tensors, IMAGES, HEADS, DEPTH, PATCH)
    return (references.as_timm(tensors, DEPTH) if timm else tensors), wanted


def make_vit(**options):
    sizes = (SIZE, PATCH, CHANNELS, WIDTH, HEADS, HIDDEN, DEPTH, LABELS)
    return ViT(*sizes, rngs=nnx.Rngs(0), **options)


@nnx.jit
def outputs(model, inputs):
    return model(inputs)


HWC = IMAGES.transpose(0, 2, 3, 1)
# The tensors and logits, how to build the model, the map, and what the model is called with.
CASES = {
    "GPT-2": (gpt2_file, make_gpt2, names.gpt2(), TOKENS),
    "GPT-2 with a prefix": (
        functools.partial(gpt2_file, "transformer."),
        make_gpt2,
        names.gpt2().with_prefix("transformer."),
        TOKENS,
    ),
    "GPT-2 with its own head": (
        gpt2_file,
        functools.partial(make_gpt2, tied=False),
        names.gpt2(),
        TOKENS,
    ),
    "Llama": (llama_file, make_llama, names.llama(), TOKENS),
    "Llama without an axis of heads": (
        llama_file,
        functools.partial(make_llama, has_head_axis=False),
        names.llama(),
        TOKENS,
    ),
    "Llama of nnx.RoPE": (
        llama_file,
        functools.partial(make_llama, rope=True),
        names.llama(),
        TOKENS,
    ),
    "Llama of nnx.RoPE with tables": (
        llama_file,
        functools.partial(make_llama, rope=True, tables=True),
        names.llama(),
        TOKENS,
    ),
    "Llama that turns pairs": (
        llama_file,
        functools.partial(make_llama, pairs=True),
        names.llama(rotary="pairs"),
        TOKENS,
    ),
    "Llama tied": (functools.partial(llama_file, tied=True), make_llama, names.llama(), TOKENS),
    "ViT": (vit_file, make_vit, names.vit(), HWC),
    "ViT of timm": (functools.partial(vit_file, timm=True), make_vit, names.timm_vit(), HWC),
}


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("case", CASES)
def test_model_computes_what_numpy_does_and_goes_back_byte_for_byte(case, stacked, tmp_path):
    file, make, name_map, inputs = CASES[case]
    tensors, wanted = file()
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.numpy.save_file(tensors, theirs, {"format": "pt"})
    model = nnx.eval_shape(lambda: make(stacked=stacked))
    assert io.load_safetensors(theirs, model, name_map).problems == []
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(outputs(model, inputs), wanted, rtol=2e-5, atol=2e-5)
    io.save_safetensors(ours, model, name_map)
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("tables", [False, True], ids=["plain", "tables"])
def test_llama_decodes_with_its_positions_in_the_cache(tables, tmp_path):
    tensors, wanted = llama_file()
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    model = make_llama(rope=True, tables=tables, decode=True)
    io.load_safetensors(tmp_path / "x.safetensors", model, names.llama())
    for layer in model.layers:
        layer.self_attn.init_cache((2, TOKENS.shape[1], WIDTH))
    parts = [TOKENS[:, :2], TOKENS[:, 2:3], TOKENS[:, 3:4], TOKENS[:, 4:]]
    with jax.default_matmul_precision("highest"):
        found = jnp.concatenate([outputs(model, part) for part in parts], axis=1)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_tables_of_rope_are_no_weights(tmp_path):
    class WithTables(nnx.Module):
        def __init__(self):
            self.llama, self.rope = make_llama(), nnx.RoPE(embedding_size=4, max_seq_len=8)

    tensors, _ = llama_file()
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.numpy.save_file(tensors, theirs, {"format": "pt"})
    tops = ("embed_tokens", "layers", "norm", "lm_head")
    name_map = names.llama().with_paths({top: f"llama/{top}" for top in tops})
    model = WithTables()
    assert io.load_safetensors(theirs, model, name_map).problems == []
    assert model.rope.cached_cos.shape == (8, 2)
    io.save_safetensors(ours, model, name_map)
    assert ours.read_bytes() == theirs.read_bytes()


def test_masks_in_old_gpt2_files_are_ignored_and_copied_from_the_original(tmp_path):
    tensors, wanted = gpt2_file()
    for n in range(DEPTH):
        mask = np.tri(POSITIONS, dtype=np.float32)[None, None]
        tensors |= {f"h.{n}.attn.bias": mask, f"h.{n}.attn.masked_bias": np.float32([-1e4])}
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.numpy.save_file(tensors, theirs, {"format": "pt"})
    model = nnx.eval_shape(make_gpt2)
    io.load_safetensors(theirs, model, names.gpt2())
    np.testing.assert_allclose(outputs(model, TOKENS), wanted, rtol=1e-3, atol=1e-3)
    io.save_safetensors(ours, model, names.gpt2(), like=theirs)
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_head_in_the_file_that_equals_the_embedding_is_accepted_where_the_model_shares(tmp_path):
    tensors, _ = gpt2_file("transformer.")
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(
        {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}, path
    )
    model = nnx.eval_shape(make_gpt2)
    assert io.load_safetensors(path, model, names.gpt2()).problems == []
    io.save_safetensors(tmp_path / "y.safetensors", model, names.gpt2(), like=path)
    assert (tmp_path / "y.safetensors").read_bytes() == path.read_bytes()
    other = tensors["transformer.wte.weight"] + 1
    safetensors.numpy.save_file({**tensors, "lm_head.weight": other}, path)
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(path, model, names.gpt2())
    assert (
        "lm_head.weight: differs from transformer.wte.weight, and the model has one entry"
        in str(error.value)
    )


def test_features_are_turned_in_halves_or_in_pairs():
    with pytest.raises(NameMapError) as error:
        names.llama(rotary="pair")
    assert str(error.value) == (
        "rotary says which features a model rotates together, but got 'pair'.\n"
        "Fix: rotary='halves' (the default), or rotary='pairs'."
    )


def test_bfloat16_weights_are_cast_on_request_and_go_back_unchanged(tmp_path):
    tensors, _ = llama_file()
    narrow = {name: jnp.asarray(x, jnp.bfloat16) for name, x in tensors.items()}
    theirs = tmp_path / "theirs.safetensors"
    io.save_safetensors(theirs, {**narrow}, metadata={"format": "pt"})
    model = nnx.eval_shape(make_llama)
    with pytest.raises(CheckpointMismatchError, match="cast=True to convert dtypes"):
        io.load_safetensors(theirs, model, names.llama())
    io.load_safetensors(theirs, model, names.llama(), cast=True)
    wide = {name: np.asarray(x, np.float32) for name, x in narrow.items()}
    wanted = references.llama(wide, TOKENS, HEADS, KV_HEADS, DEPTH)
    np.testing.assert_allclose(outputs(model, TOKENS), wanted, rtol=1e-3, atol=1e-3)
    io.save_safetensors(tmp_path / "ours.safetensors", model, names.llama(), dtype=jnp.bfloat16)
    assert (tmp_path / "ours.safetensors").read_bytes() == theirs.read_bytes()


def test_other_attribute_names_are_a_rename_away(tmp_path):
    class Mine(nnx.Module):
        def __init__(self, model):
            self.tokens, self.blocks, self.final = model.embed_tokens, model.layers, model.norm
            self.out = model.lm_head

    tensors, _ = llama_file()
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    model = nnx.eval_shape(lambda: Mine(make_llama(stacked=True)))
    mine = names.llama().with_paths(
        {"embed_tokens": "tokens", "layers": "blocks", "norm": "final", "lm_head": "out"}
    )
    io.load_safetensors(path, model, mine)
    np.testing.assert_array_equal(model.out.kernel[...], tensors["lm_head.weight"].T)
    up = model.blocks.stacked.mlp.up_proj.kernel[...]
    np.testing.assert_array_equal(up[1], tensors["model.layers.1.mlp.up_proj.weight"].T)


def hugging_face(case):
    """A model of the transformers library, and what it gives."""
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    if case == "gpt2":
        config = hf.GPT2Config(
            vocab_size=VOCAB, n_positions=POSITIONS, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS
        )
        model, inputs = hf.GPT2LMHeadModel(config), TOKENS
    elif case == "llama":
        config = hf.LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=DEPTH,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=False,
        )  # fmt: skip
        model, inputs = hf.LlamaForCausalLM(config), TOKENS
    else:
        config = hf.ViTConfig(
            image_size=SIZE, patch_size=PATCH, num_channels=CHANNELS, hidden_size=WIDTH,
            intermediate_size=HIDDEN, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
            num_labels=LABELS,
        )  # fmt: skip
        model, inputs = hf.ViTForImageClassification(config), IMAGES
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        return model, model.eval()(torch.tensor(inputs)).logits.numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard_size", ["50GB", "10KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("case", ["gpt2", "llama", "vit"])
def test_files_of_the_transformers_library_load_and_go_back(case, shard_size, tmp_path):
    theirs, wanted = hugging_face(case)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    make, name_map, inputs = {
        "gpt2": (make_gpt2, names.gpt2(), TOKENS),
        "llama": (make_llama, names.llama(), TOKENS),
        "vit": (make_vit, names.vit(), HWC),
    }[case]
    model = nnx.eval_shape(lambda: make(stacked=True))
    io.load_safetensors(tmp_path / "theirs", model, name_map)
    np.testing.assert_allclose(outputs(model, inputs), wanted, rtol=1e-4, atol=1e-4)
    io.save_safetensors(tmp_path / "ours", model, name_map, like=tmp_path / "theirs")
    for file in (tmp_path / "ours").iterdir():
        assert file.read_bytes() == (tmp_path / "theirs" / file.name).read_bytes()
