"""PPO with CleanRL's defaults, batched over groups: G independent learners as one batch of matrices.

The networks are tiny, so one agent at a time spends nearly all its time in Python. Here every operation serves all G
groups: 2G networks (an actor and a critic each) are stacked, every group has its own environments, random stream,
normaliser, permutations, optimiser state and gradient norm, and no number of one group reaches another.

Training runs in segments of whole updates. A segment begins with fresh environments, and the learner's state between
segments is all there is to save, so an interrupted training continues with the same numbers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyfold.adam import Adam
from manyfold.streams import stream
from manyfold.train.actor_critic import ActorCritic, Envs


@dataclass(frozen=True)
class Config:
    """CleanRL's ppo.py (`DISCRETE`) and ppo_continuous_action.py (`CONTINUOUS`)."""

    learning_rate: float = 2.5e-4  # annealed linearly to 0 over total_steps
    total_steps: int = 500_000
    envs: int = 4  # environments of each group
    steps: int = 128  # of each environment in an update
    gamma: float = 0.99
    gae_lambda: float = 0.95
    minibatches: int = 4
    epochs: int = 4
    clip: float = 0.2  # of the ratio and of the value loss
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    hidden: int = 64
    segment_steps: int = 10_240  # steps of a group between saves

    @property
    def batch(self) -> int:
        """Steps of one group in one update."""
        return self.envs * self.steps

    @property
    def segment(self) -> int:
        """Updates of a segment."""
        return max(1, self.segment_steps // self.batch)


DISCRETE = Config()
CONTINUOUS = Config(
    learning_rate=3e-4, total_steps=1_000_000, envs=1, steps=2048, minibatches=32, epochs=10, entropy=0.0
)


class Position(NamedTuple):
    """A moment of training: after `epoch` epochs of update `update` (both from 1); (0, 0) is the initial policy."""

    update: int
    epoch: int


def gae(r_tp1: Tensor, v_t: Tensor, done_tp1: Tensor, v_end: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates of `[T, ...]` rollouts; the step that ends an episode does not bootstrap.

    A_t = delta_t + gamma lambda (1 - done_{t+1}) A_{t+1},  delta_t = r_{t+1} + gamma (1 - done_{t+1}) v_{t+1} - v_t
    """
    alive = 1.0 - done_tp1
    delta = r_tp1 + gamma * alive * torch.cat([v_t[1:], v_end[None]]) - v_t
    decay = gamma * gae_lambda * alive
    advantages = torch.empty_like(delta)
    a_tp1 = torch.zeros_like(v_end)
    for t in reversed(range(len(delta))):
        a_tp1 = torch.addcmul(delta[t], decay[t], a_tp1)
        advantages[t] = a_tp1
    return advantages


def ppo_gradients(
    log_prob: Tensor, value: Tensor, old_log_prob: Tensor, old_value: Tensor, advantage: Tensor, config: Config
) -> tuple[Tensor, Tensor]:
    """Gradients of PPO's clipped losses in log pi(a|s) and v(s), of a minibatch `[G, B]`; `[G, B]` each.

    The loss of a group is the mean over its B samples of
        max(-A rho, -A clip(rho, 1 - c, 1 + c)) + c_v / 2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)
    with rho = pi / pi_old, A the advantage normalised over the minibatch and R = A + v_old before normalisation.
    A clipped branch that wins has gradient 0; the other's is -A rho, or v - R.
    """
    size, c = advantage.shape[1], config.clip
    std, mean = torch.std_mean(advantage, 1, keepdim=True)
    normalised = (advantage - mean).div_(std.add_(1e-8))
    rho = (log_prob - old_log_prob).exp_()
    plain = normalised * rho
    d_log_prob = plain * (plain <= normalised * rho.clamp(1 - c, 1 + c))
    error = value - old_value  # v - v_old
    near = error.clamp(-c, c).sub_(advantage)  # clip(v) - R
    error.sub_(advantage)  # v - R
    d_value = error * (error.abs() >= near.abs_())
    return d_log_prob.mul_(-1 / size), d_value.mul_(config.value / size)


def softmax_gradients(log_p: Tensor, actions: Tensor, d_log_prob: Tensor, entropy: float) -> Tensor:
    """Gradient in the logits z `[G, B, A]` of log_p = log softmax(z), given that in log pi(a|s), with the bonus -c_e H.

    d log p_a / d z_j = 1{j = a} - p_j,  d H / d z_j = -p_j (log p_j + H)
    """
    p = log_p.exp()
    negative_h = (p * log_p).sum(-1, keepdim=True)
    d = p * (log_p - negative_h).mul_(entropy / log_p.shape[1]).sub_(d_log_prob[..., None])
    return d.scatter_add_(-1, actions[..., None], d_log_prob[..., None])


def gaussian_gradients(
    outputs: Tensor, log_std: Tensor, actions: Tensor, d_log_prob: Tensor, entropy: float
) -> tuple[Tensor, Tensor]:
    """Gradients in the means `[G, B, A]` and log_std `[G, 1, A]`, given that in log pi(a|s), with the bonus -c_e H.

    d log p / d mean = z / std,  d log p / d log_std = z^2 - 1,  d H / d log_std = 1,  z = (a - mean) / std
    """
    inverse = (-log_std).exp()
    z = (actions - outputs) * inverse
    weighted = d_log_prob[..., None] * z
    d_log_std = (weighted * z).sum(1, keepdim=True) - d_log_prob.sum(1)[:, None, None] - entropy
    return weighted * inverse, d_log_std


def gaussian_log_probs(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Of actions `[G, B, A]` under diagonal Gaussians; `[G, B]`."""
    z = (actions - mean) * (-log_std).exp()
    return -(0.5 * z**2 + log_std + 0.5 * float(np.log(2 * np.pi))).sum(-1)


def _pick(x: Tensor, indices: Tensor) -> Tensor:
    """x[g, indices[g]] for every group g; `[G, B, ...]`."""
    return x[torch.arange(len(x))[:, None], indices]


Record = Callable[[Position, list[int], dict[str, Tensor]], None]


class Learner:
    """G independent PPO learners. `run_segment` trains; `save` and `load` carry on between segments.

    Args:
        envs: the environments of all groups.
        config: hyperparameters.
        names: of each group's random stream, for example ("hopper", 3); a group's numbers follow from it alone.
    """

    def __init__(self, envs: Envs, config: Config, names: list[tuple[str | int, ...]]) -> None:
        self.envs, self.config = envs, config
        self.rngs = [stream("ppo", *name) for name in names]
        generators = [torch.Generator().manual_seed(int(rng.integers(2**62))) for rng in self.rngs]
        self.networks = ActorCritic(envs, config.hidden, generators)
        self.update = 0  # updates done
        self.optimiser = Adam(self.networks.flat, self.networks.flat_grad, config.adam_eps)

    def run_segment(
        self, last_update: int, wanted: list[set[Position]], record: Record, tick: Callable[[], None]
    ) -> None:
        """Trains to the segment's end or `last_update`, handing over each group's actor at the positions it wants."""
        if self.update == 0:
            self._record(Position(0, 0), wanted, record)
        obs = self.envs.start(self.update // self.config.segment)
        for _ in range(min(self.config.segment, last_update - self.update)):
            self.update += 1
            obs, batch = self._rollout(obs)
            for epoch in range(1, self.config.epochs + 1):
                self._epoch(batch)
                self._record(Position(self.update, epoch), wanted, record)
            tick()

    def _record(self, position: Position, wanted: list[set[Position]], record: Record) -> None:
        groups = [i for i, positions in enumerate(wanted) if position in positions]
        if groups:
            statistics = {name: torch.from_numpy(x[groups].copy()) for name, x in self.envs.normaliser().items()}
            record(position, groups, self.networks.actors(groups) | statistics)

    def _rollout(self, obs: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Tensor]]:
        """One update's batch, `[G, batch, ...]` each, and the observations to go on from."""
        config, g = self.config, self.networks.n_groups
        shape = (config.steps, g, config.envs)
        log_std = self.networks.parameters.get("log_std")
        noise_shape = (config.steps, config.envs, self.envs.n_actions) if self.envs.continuous else shape[::2]
        draw = "standard_normal" if self.envs.continuous else "random"
        noise = np.stack([getattr(rng, draw)(noise_shape, dtype=np.float32) for rng in self.rngs], 1)  # [T, G, E(, A)]
        noise_t = torch.from_numpy(noise)
        # Few enough states: their outputs and values as a table, once. A step then is a look-up.
        states = self.envs.n_states * self.envs.horizon
        table = self.networks.forward(torch.arange(states).expand(g, -1)) if 0 < states <= 4 * config.batch else None
        seen, taken = [torch.from_numpy(obs)], []
        rewards, dones = np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32)
        for t in range(config.steps):
            outputs = _pick(table[0], seen[-1]) if table else self.networks.act(seen[-1])
            if log_std is not None:
                a = torch.addcmul(outputs, log_std.exp(), noise_t[t])
            else:
                cumulative = torch.softmax(outputs, -1).cumsum(-1)
                a = (noise_t[t][..., None] >= cumulative[..., :-1]).sum(-1)
            taken.append(a)
            obs, rewards[t], dones[t] = self.envs.step(a.numpy())
            seen.append(torch.from_numpy(obs))

        def flat(x: Tensor) -> Tensor:  # [T, G, E, ...] -> [G, T * E, ...]
            return x.transpose(0, 1).flatten(1, 2).contiguous()

        # Values and log-probabilities of all steps at once: in the loop they would cost as much again.
        all_seen, actions = flat(torch.stack(seen)), flat(torch.stack(taken))
        outputs, values = (_pick(x, all_seen) for x in table) if table else self.networks.forward(all_seen)
        outputs = outputs[:, : config.batch]
        if log_std is None:
            log_prob = torch.log_softmax(outputs, -1).gather(-1, actions[..., None])[..., 0]
        else:
            log_prob = gaussian_log_probs(outputs, log_std, actions)
        v = values.view(g, config.steps + 1, config.envs).transpose(0, 1)  # [T + 1, G, E]
        r_tp1, done_tp1 = torch.from_numpy(rewards), torch.from_numpy(dones)
        advantages = gae(r_tp1, v[:-1], done_tp1, v[-1], config.gamma, config.gae_lambda)
        return obs, {
            "obs": all_seen[:, : config.batch],
            "actions": actions,
            "log_prob": log_prob,
            "value": values[:, : config.batch, 0],
            "advantage": flat(advantages),
        }

    def _epoch(self, batch: dict[str, Tensor]) -> None:
        config, networks = self.config, self.networks
        order = torch.from_numpy(np.stack([rng.permutation(config.batch) for rng in self.rngs]))  # [G, batch]
        shuffled = {name: _pick(x, order) for name, x in batch.items()}
        size = config.batch // config.minibatches
        log_std = networks.parameters.get("log_std")
        rate = config.learning_rate * (1 - (self.update - 1) / (config.total_steps // config.batch))
        for i in range(config.minibatches):
            part = {name: x[:, i * size : (i + 1) * size] for name, x in shuffled.items()}
            outputs, values = networks.forward(part["obs"])
            actions, old = part["actions"], (part["log_prob"], part["value"], part["advantage"])
            if log_std is None:
                log_p = torch.log_softmax(outputs, -1)
                log_prob = log_p.gather(-1, actions[..., None])[..., 0]
            else:
                log_prob = gaussian_log_probs(outputs, log_std, actions)
            d_log_prob, d_value = ppo_gradients(log_prob, values[..., 0], *old, config)
            if log_std is None:
                d_outputs = softmax_gradients(log_p, actions, d_log_prob, config.entropy)
            else:
                d_outputs, networks.gradients["log_std"][:] = gaussian_gradients(
                    outputs, log_std, actions, d_log_prob, config.entropy
                )
            networks.backward(d_outputs, d_value[..., None])
            networks.clip_gradients(config.max_grad_norm)
            self.optimiser.step(rate)

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """All that a later `load` needs to go on, as tensors and as text (safetensors' metadata)."""
        tensors = {"flat": self.networks.flat.clone()}
        tensors |= {f"adam.{name}": x.clone() for name, x in self.optimiser.state.items()}
        tensors |= {f"envs.{name}": torch.from_numpy(np.array(x)) for name, x in self.envs.save().items()}
        states = json.dumps([rng.bit_generator.state for rng in self.rngs])
        return tensors, {"update": str(self.update), "rngs": states}

    def load(self, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
        self.networks.flat.copy_(tensors["flat"])
        for name, x in self.optimiser.state.items():
            x.copy_(tensors[f"adam.{name}"])
        self.envs.load({k.removeprefix("envs."): v.numpy() for k, v in tensors.items() if k.startswith("envs.")})
        self.update = int(text["update"])
        for rng, state in zip(self.rngs, json.loads(text["rngs"]), strict=True):
            rng.bit_generator.state = state
