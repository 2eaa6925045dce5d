"""A sequence-to-sequence LSTM that learns to add: it reads "12+7=" and writes "19".

The encoder reads padded questions with their lengths; the decoder is a scanned cell that is taught
with the right answers, or samples its own.
"""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

SYMBOLS = "0123456789+="
END, VOCABULARY = 1, len(SYMBOLS) + 2  # 0 pads
CODE = {symbol: i + 2 for i, symbol in enumerate(SYMBOLS)}
LONGEST_QUESTION, LONGEST_ANSWER = 7, 4
BATCH, STEPS, HIDDEN = 32, 40, 32


def encode(text, length):
    codes = [CODE[symbol] for symbol in text] + [END]
    return np.asarray(codes + [0] * (length - len(codes)), np.int32)


def sums(rng, batch):
    """A batch of questions and answers."""
    questions, answers = [], []
    for a, b in rng.integers(100, size=(batch, 2)):
        questions.append(encode(f"{a}+{b}", LONGEST_QUESTION))
        answers.append(encode("=" + str(a + b), LONGEST_ANSWER + 1))
    return np.stack(questions), np.stack(answers)


def lengths_of(codes):
    """How many symbols there are, the end included."""
    return jnp.argmax(codes == END, axis=-1) + 1


class Encoder(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, questions):
        x = nn.one_hot(questions, VOCABULARY, dtype=jnp.float32)
        rnn = nn.RNN(nn.LSTMCell(self.hidden), return_carry=True, name="rnn")
        carry, _ = rnn(x, seq_lengths=lengths_of(questions))
        return carry


class DecoderCell(nn.Module):
    """One symbol: the state, and the symbol before; teaching says which symbol that is."""

    hidden: int
    teacher_force: bool

    @nn.compact
    def __call__(self, carry, x):
        lstm, last = carry
        if not self.teacher_force:
            x = last
        lstm, y = nn.LSTMCell(self.hidden)(lstm, x)
        logits = nn.Dense(VOCABULARY)(y)
        drawn = jax.random.categorical(self.make_rng("sample"), logits)
        return (lstm, nn.one_hot(drawn, VOCABULARY)), (logits, drawn)


class Decoder(nn.Module):
    hidden: int
    teacher_force: bool

    @nn.compact
    def __call__(self, carry, answers):
        cell = nn.scan(
            DecoderCell,
            variable_broadcast="params",
            split_rngs={"params": False, "sample": True},
            in_axes=1,
            out_axes=1,
        )(self.hidden, self.teacher_force, name="cell")
        _, out = cell((carry, answers[:, 0]), answers)
        return out


class Seq2seq(nn.Module):
    hidden: int
    teacher_force: bool = True

    def setup(self):
        self.encoder = Encoder(self.hidden)
        self.decoder = Decoder(self.hidden, self.teacher_force)

    def __call__(self, questions, answers):
        answers = nn.one_hot(answers[:, :-1], VOCABULARY)
        return self.decoder(self.encoder(questions), answers)


def masked_loss(logits, answers):
    targets = answers[:, 1:]
    mask = jnp.arange(targets.shape[1])[None] < lengths_of(targets)[:, None]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(jnp.where(mask, each, 0.0)) / jnp.sum(mask)


@jax.jit
def train_step(state, questions, answers, key):
    def loss_fn(params):
        rngs = {"sample": jax.random.fold_in(key, state.step)}
        logits, _ = state.apply_fn({"params": params}, questions, answers, rngs=rngs)
        return masked_loss(logits, answers)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    rng = np.random.default_rng(0)
    model = Seq2seq(HIDDEN)
    questions, answers = sums(rng, BATCH)
    keys = {"params": jax.random.PRNGKey(0), "sample": jax.random.PRNGKey(1)}
    variables = model.init(keys, questions, answers)
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2)
    )
    losses = []
    for _ in range(STEPS):
        state, loss = train_step(state, *sums(rng, BATCH), jax.random.PRNGKey(2))
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.7

    free = Seq2seq(HIDDEN, teacher_force=False)
    logits, drawn = free.apply(
        {"params": state.params}, questions, answers, rngs={"sample": jax.random.PRNGKey(3)}
    )
    losses.append(float(masked_loss(logits, answers)))
    losses.append(float(jnp.mean(drawn == answers[:, 1:])))
    carry = model.bind({"params": state.params}).encoder(questions)
    losses.extend(float(jnp.linalg.norm(part)) for part in carry)
    return losses, {"params": state.params}


if __name__ == "__main__":
    print(json.dumps(main()[0]))
