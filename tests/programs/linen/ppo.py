"""Proximal policy optimisation: an actor-critic learns to push a point to its goal.

The environment is written in JAX too, so that acting and learning are one compiled function.
"""

import functools
import json
from collections.abc import Sequence

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

ACTIONS = jnp.asarray([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
ENVS, HORIZON, EPISODE = 16, 16, 24
UPDATES, EPOCHS, MINIBATCHES = 20, 2, 2
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.97, 0.95, 0.2, 0.01, 0.5


@flax.struct.dataclass
class EnvState:
    position: jax.Array
    velocity: jax.Array
    goal: jax.Array
    time: jax.Array


@flax.struct.dataclass
class Transition:
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def reset(key):
    position, goal = jax.random.uniform(key, (2, 2), minval=-1.0, maxval=1.0)
    return EnvState(position, jnp.zeros(2), goal, jnp.zeros((), jnp.int32))


def observe(env):
    return jnp.concatenate([env.goal - env.position, env.velocity])


def env_step(env, action, key):
    """The next state (a new episode after the last), the reward, and whether the episode ended."""
    velocity = 0.7 * env.velocity + 0.1 * ACTIONS[action]
    moved = env.replace(position=env.position + velocity, velocity=velocity, time=env.time + 1)
    distance = jnp.linalg.norm(moved.goal - moved.position)
    done = (distance < 0.1) | (moved.time >= EPISODE)
    reward = -0.1 * distance + jnp.where(distance < 0.1, 1.0, 0.0)
    fresh = reset(key)
    following = jax.tree_util.tree_map(lambda new, old: jnp.where(done, new, old), fresh, moved)
    return following, reward, done


class Torso(nn.Module):
    widths: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            init = nn.initializers.orthogonal(2.0**0.5)
            x = nn.tanh(nn.Dense(width, kernel_init=init, name=f"hidden_{i}")(x))
        return x


class ActorCritic(nn.Module):
    actions: int
    widths: Sequence[int] = (32, 32)

    def setup(self):
        self.torsos = {"actor": Torso(self.widths), "critic": Torso(self.widths)}
        self.policy = nn.Dense(self.actions, kernel_init=nn.initializers.orthogonal(0.01))
        self.baseline = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))

    def __call__(self, x):
        return nn.log_softmax(self.policy(self.torsos["actor"](x))), self.value(x)

    def value(self, x):
        return jnp.squeeze(self.baseline(self.torsos["critic"](x)), axis=-1)


def rollout(state, envs, key):
    """Acts for some steps in every environment."""

    def act(envs, key):
        choose, *resets = jax.random.split(key, ENVS + 1)
        observation = jax.vmap(observe)(envs)
        log_probs, value = state.apply_fn({"params": state.params}, observation)
        action = jax.random.categorical(choose, log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=-1)[:, 0]
        envs, reward, done = jax.vmap(env_step)(envs, action, jnp.stack(resets))
        return envs, Transition(observation, action, log_prob, value, reward, done)

    return jax.lax.scan(act, envs, jax.random.split(key, HORIZON))


def advantages_of(steps, last_value):
    """Generalised advantage estimation, from the last step to the first."""

    def back(carry, step):
        advantage, following = carry
        going = 1.0 - step.done
        delta = step.reward + GAMMA * following * going - step.value
        advantage = delta + GAMMA * LAMBDA * going * advantage
        return (advantage, step.value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(back, start, steps, reverse=True)[1]


def loss_fn(params, apply_fn, batch):
    steps, advantages, returns = batch
    log_probs, values = apply_fn({"params": params}, steps.observation)
    log_prob = jnp.take_along_axis(log_probs, steps.action[:, None], axis=-1)[:, 0]
    ratio = jnp.exp(log_prob - steps.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy = -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))
    value = 0.5 * jnp.mean((values - returns) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    return policy + VALUE * value - ENTROPY * entropy, entropy


def learn(state, batch, key):
    """Some epochs over shuffled minibatches."""

    def minibatch(state, part):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, entropy), grads = grad_fn(state.params, state.apply_fn, part)
        return state.apply_gradients(grads=grads), (loss, entropy)

    def epoch(state, key):
        order = jax.random.permutation(key, ENVS * HORIZON).reshape(MINIBATCHES, -1)
        return jax.lax.scan(minibatch, state, jax.tree_util.tree_map(lambda x: x[order], batch))

    return jax.lax.scan(epoch, state, jax.random.split(key, EPOCHS))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(state, envs, key):
    act_key, learn_key = jax.random.split(key)
    envs, steps = rollout(state, envs, act_key)
    last = state.apply_fn({"params": state.params}, jax.vmap(observe)(envs), method="value")
    advantages = advantages_of(steps, last)
    batch = (steps, advantages, advantages + steps.value)
    batch = jax.tree_util.tree_map(lambda x: x.reshape((-1, *x.shape[2:])), batch)
    state, (losses, entropies) = learn(state, batch, learn_key)
    return (
        state,
        envs,
        {
            "loss": losses.mean(),
            "entropy": entropies.mean(),
            "reward": steps.reward.mean(),
        },
    )


def main():
    model = ActorCritic(len(ACTIONS))
    key, init_key, env_key = jax.random.split(jax.random.key(0), 3)
    params = model.init(init_key, jnp.zeros((1, 4)))["params"]
    schedule = optax.linear_schedule(5e-3, 1e-3, UPDATES * EPOCHS * MINIBATCHES)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    envs = jax.vmap(reset)(jax.random.split(env_key, ENVS))
    losses, rewards = [], []
    for i in range(UPDATES):
        state, envs, metrics = update(state, envs, jax.random.fold_in(key, i))
        losses += [float(metrics["loss"]), float(metrics["entropy"])]
        rewards.append(float(metrics["reward"]))
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert int(state.step) == UPDATES * EPOCHS * MINIBATCHES
    return losses + rewards, {"params": state.params}


if __name__ == "__main__":
    print(json.dumps(main()[0]))
