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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyfold.streams import stream


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


class Envs(Protocol):
    """The environments of all groups, stepped together; an ended episode starts anew within the same step."""

    n_groups: int
    n_actions: int  # actions to choose from, or dimensions of a continuous one
    continuous: bool
    n_cells: int  # observations are indices t * n_cells + cell; 0 if they are vectors
    n_features: int  # width of an observation vector, or the horizon where observations are indices

    def start(self, segment: int) -> NDArray[Any]:
        """Fresh episodes in every environment; observations `[G, E]` or `[G, E, d]`."""

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.bool_]]:
        """Observations, rewards as the learner sees them and ends of episodes, `[G, E]` each."""

    def normaliser(self) -> dict[str, NDArray[np.float64]]:
        """Observation statistics of every group, `[G, d]` each; empty where observations are not normalised."""

    def save(self) -> dict[str, NDArray[Any]]:
        """What outlives a segment."""

    def load(self, saved: dict[str, NDArray[Any]]) -> None: ...

    def mean_return(self) -> float:
        """Mean undiscounted return of recently ended episodes, over all groups."""


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


def softmax_gradients(outputs: Tensor, actions: Tensor, d_log_prob: Tensor, entropy: float) -> Tensor:
    """Gradient in the logits `[G, B, A]`, given that in log pi(a|s), of the loss with its bonus -c_e H.

    d log p_a / d z_j = 1{j = a} - p_j,  d H / d z_j = -p_j (log p_j + H)
    """
    log_p = torch.log_softmax(outputs, -1)
    p = log_p.exp()
    negative_h = (p * log_p).sum(-1, keepdim=True)
    d = p * (log_p - negative_h).mul_(entropy / outputs.shape[1]).sub_(d_log_prob[..., None])
    return d.scatter_add_(-1, actions[..., None], d_log_prob[..., None])


def gaussian_gradients(
    outputs: Tensor, log_std: Tensor, actions: Tensor, d_log_prob: Tensor, entropy: float
) -> tuple[Tensor, Tensor]:
    """Gradients in the means `[G, B, A]` and log_std `[G, 1, A]`, as `softmax_gradients`.

    d log p / d mean = z / std,  d log p / d log_std = z^2 - 1,  d H / d log_std = 1,  z = (a - mean) / std
    """
    inverse = (-log_std).exp()
    z = (actions - outputs) * inverse
    weighted = d_log_prob[..., None] * z
    d_log_std = (weighted * z).sum(1, keepdim=True) - d_log_prob.sum(1)[:, None, None] - entropy
    return weighted * inverse, d_log_std


def _tanh_(x: Tensor) -> Tensor:
    """tanh(x) = 2 sigmoid(2x) - 1 in place: equal to torch's within 2e-7, three times as fast on a CPU."""
    return x.mul_(2).sigmoid_().mul_(2).sub_(1)


class Networks:
    """G actors (networks 0..G-1) and G critics (G..2G-1): tanh MLPs with two hidden layers, orthogonal initialisation.

    All parameters live in one flat buffer, and so do their gradients: Adam and the norms are a few operations. The
    backward pass is written out, into buffers that are kept: with autograd a third of the time goes into fresh memory.
    """

    def __init__(self, envs: Envs, hidden: int, generators: list[torch.Generator]) -> None:
        self.n_groups, self.n_cells, self.n_features = envs.n_groups, envs.n_cells, envs.n_features
        g, n, h, out = self.n_groups, 2 * self.n_groups, hidden, envs.n_actions
        inputs = self.n_cells or self.n_features
        shapes: dict[str, tuple[int, ...]] = {"w1": (n, inputs, h)}
        if self.n_cells:
            shapes["w1_time"] = (n, 1, h)
        shapes |= {"b1": (n, 1, h), "w2": (n, h, h), "b2": (n, 1, h)}
        shapes |= {"actor_w": (g, out, h), "actor_b": (g, 1, out), "critic_w": (g, 1, h), "critic_b": (g, 1, 1)}
        if envs.continuous:
            shapes["log_std"] = (g, 1, out)
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.flat, self.flat_grad = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        self.parameters: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        parts, grads = torch.split(self.flat, sizes), torch.split(self.flat_grad, sizes)
        for (name, shape), part, grad in zip(shapes.items(), parts, grads, strict=True):
            self.parameters[name], self.gradients[name] = part.view(shape), grad.view(shape)
        self._initialise(generators)
        # A one-hot input is an index: row `cell` of network n in the stacked first layer.
        self._row = torch.arange(n)[:, None] * self.n_cells
        self._buffers: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def _initialise(self, generators: list[torch.Generator]) -> None:
        p = self.parameters
        for i, generator in enumerate(generators):
            for network in (i, self.n_groups + i):  # actor, critic
                first = torch.cat([p["w1"][network], p["w1_time"][network]]) if self.n_cells else p["w1"][network]
                _orthogonal(first, 2**0.5, generator)
                p["w1"][network] = first[: p["w1"].shape[1]]
                if self.n_cells:
                    p["w1_time"][network] = first[-1:]
                _orthogonal(p["w2"][network], 2**0.5, generator)
            _orthogonal(p["actor_w"][i].mT, 0.01, generator)  # heads are stored [out, h]: their gradient is faster
            _orthogonal(p["critic_w"][i].mT, 1.0, generator)

    def act(self, obs: Tensor) -> Tensor:
        """Actor outputs `[G, B, A]` of observations `[G, B]` (indices) or `[G, B, d]`."""
        h2 = self._hidden(obs)
        return torch.baddbmm(self.parameters["actor_b"], h2, self.parameters["actor_w"].mT)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actor outputs `[G, B, A]` and values `[G, B, 1]` of observations `[G, B]` (indices) or `[G, B, d]`."""
        p, g = self.parameters, self.n_groups
        h2 = self._hidden(torch.cat([obs, obs]))
        outputs = torch.baddbmm(p["actor_b"], h2[:g], p["actor_w"].mT)
        return outputs, torch.baddbmm(p["critic_b"], h2[g:], p["critic_w"].mT)

    def _hidden(self, obs: Tensor) -> Tensor:
        """The last hidden layer of the first n networks at observations `[n, B, ...]`; `[n, B, h]`."""
        n, size = obs.shape[:2]
        p = {name: self.parameters[name][:n] for name in ("w1", "w1_time", "b1", "w2", "b2") if name in self.parameters}
        if (n, size) not in self._buffers:
            self._buffers[n, size] = tuple(torch.empty(n, size, p["w2"].shape[-1]) for _ in range(4))
        h1, h2, _, _ = self._buffers[n, size]
        if self.n_cells:
            rows = (obs % self.n_cells + self._row[:n]).flatten()
            time = (torch.div(obs, self.n_cells, rounding_mode="floor") / self.n_features)[..., None]  # [n, B, 1]
            torch.index_select(p["w1"].flatten(0, 1), 0, rows, out=h1.view(-1, h1.shape[-1]))
            h1.addcmul_(time, p["w1_time"]).add_(p["b1"])
            self._inputs: tuple[Tensor, ...] = (rows, time)
        else:
            torch.baddbmm(p["b1"], obs, p["w1"], out=h1)
            self._inputs = (obs,)
        _tanh_(h1)
        return _tanh_(torch.baddbmm(p["b2"], h1, p["w2"], out=h2))

    def backward(self, d_outputs: Tensor, d_values: Tensor) -> None:
        """Gradients of the last `forward`, given those of its results; d tanh = 1 - tanh^2."""
        p, grad, g = self.parameters, self.gradients, self.n_groups
        h1, h2, d1, d2 = self._buffers[2 * g, d_outputs.shape[1]]
        for half, d, name, part in ((h2[:g], d_outputs, "actor", d2[:g]), (h2[g:], d_values, "critic", d2[g:])):
            torch.bmm(d.mT, half, out=grad[f"{name}_w"])
            torch.sum(d, 1, keepdim=True, out=grad[f"{name}_b"])
            torch.bmm(d, p[f"{name}_w"], out=part)
        d2.addcmul_(d2, h2.square_(), value=-1)
        torch.bmm(h1.mT, d2, out=grad["w2"])
        torch.sum(d2, 1, keepdim=True, out=grad["b2"])
        torch.bmm(d2, p["w2"].mT, out=d1)
        d1.addcmul_(d1, h1.square_(), value=-1)
        torch.sum(d1, 1, keepdim=True, out=grad["b1"])
        if self.n_cells:
            rows, time = self._inputs
            torch.bmm(time.mT, d1, out=grad["w1_time"])
            grad["w1"].zero_().flatten(0, 1).index_add_(0, rows, d1.flatten(0, 1))
        else:
            torch.bmm(self._inputs[0].mT, d1, out=grad["w1"])

    def clip_gradients(self, max_norm: float) -> None:
        """Scales each group's gradient (actor and critic together) to a norm of at most `max_norm`."""
        squares = torch.zeros(self.n_groups)
        for grad in self.gradients.values():
            squares += torch.linalg.vector_norm(grad.flatten(1), dim=1).square_().view(-1, self.n_groups).sum(0)
        scale = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)[:, None, None]
        twice = torch.cat([scale, scale])
        for grad in self.gradients.values():
            grad.mul_(scale if len(grad) == self.n_groups else twice)

    def actors(self, groups: list[int]) -> dict[str, Tensor]:
        """Copies of some groups' actors: w1 `[n, inputs, h]` (the time's row last), b1, w2, b2, w3, b3, log_std."""
        p = {name: value[groups] for name, value in self.parameters.items()}
        w1 = torch.cat([p["w1"], p["w1_time"]], 1) if self.n_cells else p["w1"]
        out = {"w1": w1, "b1": p["b1"], "w2": p["w2"], "b2": p["b2"], "w3": p["actor_w"].mT, "b3": p["actor_b"]}
        return out | ({"log_std": p["log_std"]} if "log_std" in p else {})


def _orthogonal(w: Tensor, gain: float, generator: torch.Generator) -> None:
    """`[in, out]` in place; torch's own initialisation is for `[out, in]`."""
    w.copy_(torch.nn.init.orthogonal_(torch.empty(w.shape[1], w.shape[0]), gain, generator=generator).T)


def log_probs(outputs: Tensor, actions: Tensor, log_std: Tensor | None) -> Tensor:
    """Of actions `[G, B]` under softmax, or `[G, B, A]` under a diagonal Gaussian; `[G, B]`."""
    if log_std is None:
        return torch.log_softmax(outputs, -1).gather(-1, actions[..., None])[..., 0]
    z = (actions - outputs) * (-log_std).exp()
    return -(0.5 * z**2 + log_std + 0.5 * float(np.log(2 * np.pi))).sum(-1)


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
        self.networks = Networks(envs, config.hidden, generators)
        self.update = 0  # updates done
        self.networks.flat.grad = self.networks.flat_grad
        self.optimiser = torch.optim.Adam([self.networks.flat], eps=config.adam_eps, fused=True)

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
        seen, taken = [torch.from_numpy(obs)], []
        rewards, dones = np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32)
        for t in range(config.steps):
            outputs = self.networks.act(seen[-1])
            if log_std is not None:
                a = torch.addcmul(outputs, log_std.exp(), noise_t[t])
            else:
                cumulative = torch.softmax(outputs, -1).cumsum(-1)
                a = (noise_t[t][..., None] >= cumulative[..., :-1]).sum(-1)
            taken.append(a)
            obs, rewards[t], dones[t] = self.envs.step(a.numpy())
            seen.append(torch.from_numpy(obs))

        def flat(x: Tensor) -> Tensor:  # [T, G, E, ...] -> [G, T * E, ...]
            return x.transpose(0, 1).flatten(1, 2)

        # Values and log-probabilities of all steps at once: in the loop they would cost as much again.
        all_outputs, all_values = self.networks.forward(flat(torch.stack(seen)))
        v = all_values.view(g, config.steps + 1, config.envs).transpose(0, 1)  # [T + 1, G, E]
        advantages = gae(
            torch.from_numpy(rewards), v[:-1], torch.from_numpy(dones), v[-1], config.gamma, config.gae_lambda
        )
        actions = flat(torch.stack(taken))
        return obs, {
            "obs": flat(torch.stack(seen[:-1])),
            "actions": actions,
            "log_prob": log_probs(all_outputs[:, : config.batch], actions, log_std),
            "value": all_values[:, : config.batch, 0],
            "advantage": flat(advantages),
        }

    def _epoch(self, batch: dict[str, Tensor]) -> None:
        config, networks = self.config, self.networks
        order = torch.from_numpy(np.stack([rng.permutation(config.batch) for rng in self.rngs]))  # [G, batch]
        shuffled = {name: x[torch.arange(len(x))[:, None], order] for name, x in batch.items()}
        size = config.batch // config.minibatches
        log_std = networks.parameters.get("log_std")
        updates = config.total_steps // config.batch
        self.optimiser.param_groups[0]["lr"] = config.learning_rate * (1 - (self.update - 1) / updates)
        for i in range(config.minibatches):
            part = {name: x[:, i * size : (i + 1) * size] for name, x in shuffled.items()}
            outputs, values = networks.forward(part["obs"])
            log_prob = log_probs(outputs, part["actions"], log_std)
            old = (part["log_prob"], part["value"], part["advantage"])
            d_log_prob, d_value = ppo_gradients(log_prob, values[..., 0], *old, config)
            if log_std is None:
                d_outputs = softmax_gradients(outputs, part["actions"], d_log_prob, config.entropy)
            else:
                d_outputs, networks.gradients["log_std"][:] = gaussian_gradients(
                    outputs, log_std, part["actions"], d_log_prob, config.entropy
                )
            networks.backward(d_outputs, d_value[..., None])
            networks.clip_gradients(config.max_grad_norm)
            self.optimiser.step()

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """All that a later `load` needs to go on, as tensors and as text (safetensors' metadata)."""
        tensors = {"flat": self.networks.flat.clone()}
        tensors |= {f"adam.{name}": x.clone() for name, x in self.optimiser.state[self.networks.flat].items()}
        tensors |= {f"envs.{name}": torch.from_numpy(np.array(x)) for name, x in self.envs.save().items()}
        states = json.dumps([rng.bit_generator.state for rng in self.rngs])
        return tensors, {"update": str(self.update), "rngs": states}

    def load(self, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
        self.networks.flat.copy_(tensors["flat"])
        adam = {name.removeprefix("adam."): x for name, x in tensors.items() if name.startswith("adam.")}
        self.optimiser.state[self.networks.flat] = adam
        self.envs.load({k.removeprefix("envs."): v.numpy() for k, v in tensors.items() if k.startswith("envs.")})
        self.update = int(text["update"])
        for rng, state in zip(self.rngs, json.loads(text["rngs"]), strict=True):
            rng.bit_generator.state = state
