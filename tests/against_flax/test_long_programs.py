"""Longer programs, of the kinds that code bases are made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.against_flax.compare import program, same_on_both
from tests.models import normal

PROGRAMS = {}
numbers = functools.partial(normal, seed=3)


# ---- a diffusion model: UNet, EMA, samplers -----------------------------------------------------


def unet(nnx, rngs, channels=4):
    """A small UNet with skip connections, conditioned on the time."""

    class ResBlock(nnx.Module):
        def __init__(self, ins, outs, *, rngs):
            self.norm1 = nnx.GroupNorm(ins, num_groups=2, rngs=rngs)
            self.conv1 = nnx.Conv(ins, outs, (3, 3), rngs=rngs)
            self.time = nnx.Linear(8, outs, rngs=rngs)
            self.norm2 = nnx.GroupNorm(outs, num_groups=2, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            zeros = nnx.initializers.normal(1e-2)
            self.conv2 = nnx.Conv(outs, outs, (3, 3), kernel_init=zeros, rngs=rngs)
            self.skip = nnx.Conv(ins, outs, (1, 1), rngs=rngs) if ins != outs else None

        def __call__(self, x, t):
            h = self.conv1(nnx.silu(self.norm1(x)))
            h = h + self.time(nnx.silu(t))[:, None, None, :]
            h = self.conv2(self.drop(nnx.silu(self.norm2(h))))
            return h + (x if self.skip is None else self.skip(x))

    class Attention(nnx.Module):
        def __init__(self, size, *, rngs):
            self.norm = nnx.GroupNorm(size, num_groups=2, rngs=rngs)
            self.heads = nnx.MultiHeadAttention(2, size, decode=False, rngs=rngs)

        def __call__(self, x):
            flat = self.norm(x).reshape(x.shape[0], -1, x.shape[-1])
            return x + self.heads(flat).reshape(x.shape)

    class UNet(nnx.Module):
        def __init__(self, *, rngs):
            self.time = nnx.Sequential(
                nnx.Linear(8, 8, rngs=rngs), nnx.silu, nnx.Linear(8, 8, rngs=rngs)
            )
            self.enter = nnx.Conv(1, channels, (3, 3), rngs=rngs)
            self.down = nnx.List([ResBlock(channels, 2 * channels, rngs=rngs)])
            self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            self.middle = Attention(2 * channels, rngs=rngs)
            self.grow = nnx.ConvTranspose(
                2 * channels, 2 * channels, (2, 2), strides=(2, 2), rngs=rngs
            )
            self.up = nnx.List([ResBlock(4 * channels, channels, rngs=rngs)])
            self.out = nnx.Conv(channels, 1, (3, 3), rngs=rngs)

        def __call__(self, x, t):
            frequencies = jnp.exp(-jnp.arange(4.0))
            angles = t[:, None] * frequencies[None]
            t = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
            x, skips = self.enter(x), []
            for block in self.down:
                x = block(x, t)
                skips.append(x)
            x = self.grow(self.middle(self.pool(x)))
            for block in self.up:
                x = block(jnp.concatenate([x, skips.pop()], -1), t)
            return self.out(x)

    return UNet(rngs=rngs)


def diffusion_step(nnx, ema_rate):
    def loss_fn(model, images, t, noise):
        mixed = (1 - t)[:, None, None, None] * images + t[:, None, None, None] * noise
        return ((model(mixed, t) - (noise - images)) ** 2).mean()

    @nnx.jit
    def step(model, ema, optimizer, rngs, images):
        t = rngs.time.uniform((images.shape[0],))
        noise = rngs.noise.normal(images.shape)
        loss, grads = nnx.value_and_grad(loss_fn)(model, images, t, noise)
        optimizer.update(model, grads)
        old, new = nnx.state(ema, nnx.Param), nnx.state(model, nnx.Param)
        nnx.update(ema, jax.tree.map(lambda e, w: ema_rate * e + (1 - ema_rate) * w, old, new))
        return loss

    return step


IMAGES = numbers(2, 4, 4, 1)


@program(PROGRAMS)
def a_unet_with_ema(f):
    nnx = f.nnx
    model = unet(nnx, nnx.Rngs(0, dropout=1))
    ema = nnx.clone(model)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rngs, step = nnx.Rngs(time=5, noise=6), diffusion_step(nnx, 0.9)
    losses = [step(model, ema, optimizer, rngs, IMAGES) for _ in range(3)]
    ema.eval()
    t = jnp.array([0.2, 0.7])
    return losses, ema(IMAGES, t), nnx.state(ema, nnx.Param), nnx.state(model, nnx.RngState)


@program(PROGRAMS)
def a_sampler_over_leaves(f):
    """Steps of a sampler that holds the graph definition and a flat list of leaves."""
    nnx = f.nnx
    model = unet(nnx, nnx.Rngs(0))
    model.eval()
    graphdef, state = nnx.split(model)
    leaves = jax.tree.leaves(state)

    @functools.partial(jax.jit, static_argnums=0)
    def euler(graphdef, leaves, x, times):
        def body(x, pair):
            t, after = pair
            velocity = nnx.merge(graphdef, leaves)(x, jnp.full((x.shape[0],), t))
            return x + (after - t) * velocity, (velocity**2).mean()

        return jax.lax.scan(body, x, (times[:-1], times[1:]))

    @functools.partial(jax.jit, static_argnums=0)
    def heun(graphdef, leaves, x, times):
        def velocity(x, t):
            return nnx.merge(graphdef, leaves)(x, jnp.full((x.shape[0],), t))

        def body(n, x):
            t, after = times[n], times[n + 1]
            first = velocity(x, t)
            second = velocity(x + (after - t) * first, after)
            return x + (after - t) * (first + second) / 2

        return jax.lax.fori_loop(0, len(times) - 1, body, x)

    times = jnp.linspace(1.0, 0.0, 4)
    noise = numbers(2, 4, 4, 1, seed=9)
    return euler(graphdef, leaves, noise, times), heun(graphdef, leaves, noise, times)


@program(PROGRAMS)
def a_guided_sampler(f):
    """A sampler as an object, with guidance, under nnx transforms and keys of its own."""
    nnx = f.nnx

    class Sampler(nnx.Module):
        def __init__(self, model, steps, *, rngs):
            self.model, self.steps, self.rngs = model, steps, rngs
            self.calls = nnx.Variable(jnp.array(0))

        def score(self, x, t, scale):
            self.calls[...] += 1
            plain = self.model(x, t)
            return plain + scale * (self.model(x, 0 * t) - plain)

        @nnx.jit
        def __call__(self, x, scale):
            @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
            def step(model, x, inputs):
                t, noise = inputs
                ts = jnp.full((x.shape[0],), t)
                plain = model(x, ts)
                guided = plain + scale * (model(x, 0 * ts) - plain)
                return x - 0.1 * guided + 0.01 * noise

            self.calls[...] += self.steps
            noise = self.rngs.noise.normal((self.steps, *x.shape))
            return step(self.model, x, (jnp.linspace(1.0, 0.2, self.steps), noise))

    model = unet(nnx, nnx.Rngs(0))
    model.eval()
    sampler = Sampler(model, 3, rngs=nnx.Rngs(noise=4))
    outs = [sampler(IMAGES, scale) for scale in (0.0, 2.0)]
    return outs, sampler.score(IMAGES, jnp.array([0.5, 0.1]), 1.5), sampler.calls


# ---- a transformer: scan over layers, cache, sampling -------------------------------------------


def transformer(nnx, depth=3, size=8, vocabulary=11):
    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.norm1, self.norm2 = (nnx.RMSNorm(size, rngs=rngs) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(
                2, size, use_bias=False, decode=False, rngs=rngs
            )
            self.up = nnx.Linear(size, 2 * size, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(2 * size, size, use_bias=False, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x, mask, decode=False):
            x = x + self.drop(self.attention(self.norm1(x), mask=mask, decode=decode))
            return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))

    class Decoder(nnx.Module):
        def __init__(self, *, rngs):
            self.embed = nnx.Embed(vocabulary, size, rngs=rngs)
            self.norm = nnx.RMSNorm(size, rngs=rngs)

            @nnx.split_rngs(splits=depth)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return Block(rngs=rngs)

            self.blocks = make(rngs=rngs)

        def __call__(self, tokens, decode=False):
            mask = None if decode else nnx.make_causal_mask(tokens)

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, block):
                return block(x, mask, decode=decode)

            x = forward(self.embed(tokens), self.blocks)
            return self.embed.attend(self.norm(x))

        def start(self, batch, length):
            """A cache for each layer."""

            @nnx.vmap
            def each(block):
                block.attention.init_cache((batch, length, size))

            each(self.blocks)

    return Decoder(rngs=nnx.Rngs(params=0, dropout=1))


TOKENS = jnp.array([[1, 5, 2, 7], [3, 3, 0, 10]])


@program(PROGRAMS)
def a_scanned_transformer_trained(f):
    nnx = f.nnx
    model = transformer(nnx)
    decay = lambda params: jax.tree.map(lambda x: x.ndim > 2, params)  # noqa: E731
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, mask=decay), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, metrics, tokens):
        def loss_fn(model):
            logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (logits, labels)

        (loss, (logits, labels)), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss, logits=logits, labels=labels)
        return optax.global_norm(grads)

    norms = [step(model, optimizer, metrics, TOKENS) for _ in range(3)]
    return norms, metrics.compute(), nnx.state(model, nnx.Param), nnx.state(model, nnx.RngState)


@program(PROGRAMS)
def a_scanned_transformer_with_a_cache(f):
    nnx = f.nnx
    model = transformer(nnx)
    model.eval()
    whole = model(TOKENS)
    model.start(2, 4)

    @nnx.jit
    def next_logits(model, token):
        return model(token, decode=True)

    steps = [next_logits(model, TOKENS[:, n : n + 1]) for n in range(4)]
    return whole, steps, nnx.state(model, nnx.Cache)


@program(PROGRAMS)
def generation_in_a_loop(f):
    nnx = f.nnx
    model = transformer(nnx, depth=2)
    model.eval()
    model.start(2, 5)

    @nnx.jit
    def generate(model, rngs, first):
        def body(_, held):
            model, rngs, token, found, n = held
            logits = model(token, decode=True)[:, -1]
            token = jax.random.categorical(rngs.sample(), logits / 0.8)[:, None]
            return model, rngs, token, found.at[:, n].set(token[:, 0]), n + 1

        held = (model, rngs, first, jnp.zeros((2, 4), first.dtype), 0)
        return nnx.fori_loop(0, 4, body, held)[3]

    rngs = nnx.Rngs(sample=7)
    return generate(model, rngs, TOKENS[:, :1]), nnx.state(rngs), nnx.state(model, nnx.Cache)


# ---- other models of a zoo ----------------------------------------------------------------------


@program(PROGRAMS)
def a_variational_autoencoder(f):
    nnx = f.nnx

    class Encoder(nnx.Module):
        def __init__(self, *, rngs):
            self.body, self.rngs = nnx.Linear(6, 8, rngs=rngs), rngs
            self.mean, self.deviation = (nnx.Linear(8, 2, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            h = nnx.relu(self.body(x))
            mean, deviation = self.mean(h), jnp.exp(self.deviation(h))
            self.sow(
                nnx.Intermediate, "kl", (mean**2 + deviation**2 - 2 * self.deviation(h) - 1).mean()
            )
            return mean + deviation * self.rngs.noise.normal(mean.shape)

    class Vae(nnx.Module):
        def __init__(self, *, rngs):
            self.encoder = Encoder(rngs=rngs)
            self.decoder = nnx.Sequential(
                nnx.Linear(2, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 6, rngs=rngs)
            )

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    model = Vae(rngs=nnx.Rngs(0, noise=1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = numbers(4, 6)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            out = model(x)
            kl = sum(map(jnp.sum, jax.tree.leaves(nnx.pop(model, nnx.Intermediate))))
            return ((out - x) ** 2).mean() + 0.1 * kl

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [step(model, optimizer) for _ in range(3)], nnx.state(model)


@program(PROGRAMS)
def two_players(f):
    """A generator and a discriminator with spectral norms, each with an optimizer."""
    nnx = f.nnx

    class Critic(nnx.Module):
        def __init__(self, *, rngs):
            self.one = nnx.SpectralNorm(nnx.Linear(4, 8, rngs=rngs), rngs=rngs)
            self.two = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x, update_stats):
            return self.two(nnx.leaky_relu(self.one(x, update_stats=update_stats)))

    rngs = nnx.Rngs(0, noise=1)
    critic = Critic(rngs=rngs)
    maker = nnx.Sequential(
        nnx.Linear(2, 8, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.relu,
        nnx.Linear(8, 4, rngs=rngs),
    )
    critic_tx = nnx.Optimizer(critic, optax.adam(1e-2, b1=0.5), wrt=nnx.Param)
    maker_tx = nnx.Optimizer(maker, optax.adam(1e-2, b1=0.5), wrt=nnx.Param)

    @nnx.jit
    def step(critic, maker, critic_tx, maker_tx, rngs, real):
        z = rngs.noise.normal((real.shape[0], 2))

        def critic_loss(critic):
            fake = jax.lax.stop_gradient(nnx.clone(maker)(z))
            score = critic(real, update_stats=True), critic(fake, update_stats=False)
            return nnx.softplus(-score[0]).mean() + nnx.softplus(score[1]).mean()

        def maker_loss(maker, critic):
            return nnx.softplus(-critic(maker(z), update_stats=False)).mean()

        of_critic, grads = nnx.value_and_grad(critic_loss)(critic)
        critic_tx.update(critic, grads)
        of_maker, grads = nnx.value_and_grad(maker_loss)(maker, critic)
        maker_tx.update(maker, grads)
        return of_critic, of_maker

    real = numbers(4, 4)
    values = [step(critic, maker, critic_tx, maker_tx, rngs, real) for _ in range(2)]
    return values, nnx.state(critic), nnx.state(maker)


@program(PROGRAMS)
def a_residual_network_that_is_finetuned(f):
    """A backbone is frozen, the head is new, and batch statistics move."""
    nnx = f.nnx

    class Residual(nnx.Module):
        def __init__(self, ins, outs, stride, *, rngs):
            conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
            self.conv1 = conv(ins, outs, (3, 3), strides=stride)
            self.norm1, self.norm2 = (nnx.BatchNorm(outs, rngs=rngs) for _ in range(2))
            self.conv2 = conv(outs, outs, (3, 3))
            self.project = conv(ins, outs, (1, 1), strides=stride) if stride != 1 else None

        def __call__(self, x):
            h = nnx.relu(self.norm1(self.conv1(x)))
            short = x if self.project is None else self.project(x)
            return nnx.relu(short + self.norm2(self.conv2(h)))

    class Net(nnx.Module):
        def __init__(self, classes, *, rngs):
            self.stem = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.blocks = nnx.Sequential(Residual(4, 4, 1, rngs=rngs), Residual(4, 6, 2, rngs=rngs))
            self.head = nnx.Linear(6, classes, rngs=rngs)

        def __call__(self, x):
            return self.head(self.blocks(self.stem(x)).mean((1, 2)))

    model = Net(10, rngs=nnx.Rngs(0))
    model.head = nnx.Linear(6, 2, rngs=nnx.Rngs(5))
    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=wrt)
    labels = jnp.array([0, 1])

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        return value

    losses = [step(model, optimizer, IMAGES) for _ in range(2)]
    model.eval()
    return losses, model(IMAGES), nnx.state(model)


@program(PROGRAMS)
def an_agent_that_learns(f):
    """Two heads on one body, targets that follow, and a loop over time in a scan."""
    nnx = f.nnx

    class Agent(nnx.Module):
        def __init__(self, *, rngs):
            self.body = nnx.GRUCell(3, 5, rngs=rngs)
            self.policy, self.value = nnx.Linear(5, 2, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, carry, x):
            carry, h = self.body(carry, x)
            return carry, (self.policy(h), self.value(h)[..., 0])

    agent = Agent(rngs=nnx.Rngs(0))
    target = nnx.clone(agent)
    optimizer = nnx.Optimizer(agent, optax.rmsprop(1e-2), wrt=nnx.Param)
    states, rewards = numbers(4, 2, 3), numbers(4, 2, seed=8)

    def unroll(agent, states):
        carry = agent.body.initialize_carry((2, 3), nnx.Rngs(0))
        run = nnx.scan(
            lambda agent, carry, x: agent(carry, x),
            in_axes=(None, nnx.Carry, 0),
            out_axes=(nnx.Carry, 0),
        )
        return run(agent, carry, states)[1]

    @nnx.jit
    def step(agent, target, optimizer, states, rewards):
        _, later = unroll(target, states)

        def loss(agent):
            logits, values = unroll(agent, states)
            wanted = rewards[:-1] + 0.9 * jax.lax.stop_gradient(later[1:])
            entropy = -(nnx.softmax(logits) * nnx.log_softmax(logits)).sum(-1).mean()
            return ((values[:-1] - wanted) ** 2).mean() - 0.01 * entropy

        value, grads = nnx.value_and_grad(loss)(agent)
        optimizer.update(agent, grads)
        moved = optax.incremental_update(nnx.state(agent), nnx.state(target), 0.1)
        nnx.update(target, moved)
        return value

    values = [step(agent, target, optimizer, states, rewards) for _ in range(3)]
    return values, nnx.state(agent), nnx.state(target)


assert np.isfinite(IMAGES).all()

test_programs = same_on_both(PROGRAMS)
