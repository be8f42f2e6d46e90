"""What the hand-written gradients buy: one update of PPO and one of a fit, each against batched autograd, one thread.

Both sides have the same networks, all groups (or policies) as one batch of matrices, the same loss, clipping and Adam;
their gradients are compared first. They take turns in one process, and the median counts, so that a busy machine slows
both. PPO's autograd has three rows: torch's tanh; the library's faster one, made of a sigmoid; and that one with its
derivative written by hand, the only one there. Of the ways to write each forward pass, the fastest is here.

Autograd allocates every activation, and glibc may return freed memory to the system and fetch it again, page by page;
whether it does depends on what the process freed before. Each case therefore runs with glibc's defaults and with freed
memory retained, two calls of mallopt: that column is autograd at its best.
"""

import ctypes
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.show import show
from manyfold.arrays import Ints
from manyfold.data.transitions import About, Batch, Transitions, Writer
from manyfold.fqe import engine
from manyfold.streams import stream
from manyfold.train import ppo

GROUPS, POLICIES, ROWS = 30, 10, 100_000
SECONDS = 5.0  # of each measurement
TOLERANCE = 1e-5  # of the gradients, relative to the largest entry of their parameter
HAND = "hand-written"

Sides = dict[str, Callable[[], int]]  # name -> runs some updates, returns how many


@dataclass(frozen=True)
class Shapes:
    """What PPO's networks need to know of their environments (the attributes of `actor_critic.Envs`)."""

    n_actions: int
    continuous: bool
    n_states: int
    n_features: int
    horizon: int
    n_groups: int = GROUPS


PPO_CASES = {
    "PPO, Gridworld 1,000": (Shapes(4, False, 100, 0, 10), ppo.DISCRETE),
    "PPO, Hopper": (Shapes(3, True, 0, 11, 1000), ppo.CONTINUOUS),
}
FIT_CASES = {  # horizon, actions, width of a state, states (0: they are vectors)
    "fit, index states": (10, 4, 1, 100),
    "fit, vector states": (100, 10, 13, 0),
}


def sigmoid_tanh(x: Tensor) -> Tensor:
    """The hand-written side's faster tanh, from operations that autograd knows."""
    return x.mul(2).sigmoid_().mul(2).sub_(1)


class OwnTanh(torch.autograd.Function):
    """The same in place, with d tanh = 1 - tanh^2 as its derivative: the one thing written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.mul_(2).sigmoid_().mul_(2).sub_(1)
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        through: Tensor = torch.ops.aten.tanh_backward(d, *ctx.saved_tensors)
        return through


TANHS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd, torch.tanh": torch.tanh,
    "autograd, sigmoid tanh": sigmoid_tanh,
    "autograd, own tanh": OwnTanh.apply,
}


class AutogradLearner(ppo.Learner):
    """PPO whose gradients are autograd's; everything else is the library's."""

    def __init__(
        self, envs: Any, config: ppo.Config, names: list[tuple[str | int, ...]], tanh: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(envs, config, names)
        self.tanh = tanh
        self.leaves = leaves(self.networks.parameters, self.networks.gradients)

    def _epoch(self, batch: dict[str, Tensor]) -> None:
        config, networks = self.config, self.networks
        order = torch.from_numpy(np.stack([rng.permutation(config.batch) for rng in self.rngs]))  # [G, batch]
        shuffled = {name: ppo._pick(x, order) for name, x in batch.items()}
        size = config.batch // config.minibatches
        rate = config.learning_rate * (1 - (self.update - 1) / (config.total_steps // config.batch))
        for i in range(config.minibatches):
            part = {name: x[:, i * size : (i + 1) * size] for name, x in shuffled.items()}
            networks.flat_grad.zero_()
            self.loss(part).backward()  # type: ignore[no-untyped-call]
            networks.clip_gradients(config.max_grad_norm)
            self.optimiser.step(rate)

    def loss(self, part: dict[str, Tensor]) -> Tensor:
        """The sum of all groups' losses: no gradient of one group reaches another."""
        config, log_std, c = self.config, self.leaves.get("log_std"), self.config.clip
        actions, old_value, advantage = part["actions"], part["value"], part["advantage"]
        outputs, value = self.forward(part["obs"])  # [G, B, A], [G, B]
        if log_std is None:
            log_p = torch.log_softmax(outputs, -1)
            log_prob = log_p.gather(-1, actions[..., None])[..., 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
        else:
            log_prob = ppo.gaussian_log_probs(outputs, log_std, actions)
            entropy = log_std.sum(-1)  # plus a constant
        std, mean = torch.std_mean(advantage, 1, keepdim=True)
        normalised = (advantage - mean) / (std + 1e-8)
        rho = (log_prob - part["log_prob"]).exp()
        policy_loss = torch.max(-normalised * rho, -normalised * rho.clamp(1 - c, 1 + c))
        returns = advantage + old_value
        near = old_value + (value - old_value).clamp(-c, c)
        value_loss = 0.5 * torch.max((value - returns) ** 2, (near - returns) ** 2)
        loss = (policy_loss + config.value * value_loss).mean(1)  # [G]
        return (loss - config.entropy * entropy.mean(1) if config.entropy else loss).sum()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        p, networks = self.leaves, self.networks
        both = torch.cat([obs, obs])  # actors, critics
        if networks.n_states:
            rows = (both % networks.n_states + networks._row).flatten()
            moment = (torch.div(both, networks.n_states, rounding_mode="floor") / networks.horizon)[..., None]
            first = p["w1"].flatten(0, 1).index_select(0, rows).view(*both.shape, -1)
            h1 = torch.addcmul(first, moment, p["w1_time"]).add_(p["b1"])
        else:
            h1 = torch.baddbmm(p["b1"], both, p["w1"])
        actor, critic = self.tanh(torch.baddbmm(p["b2"], self.tanh(h1), p["w2"])).chunk(2)
        outputs = torch.baddbmm(p["actor_b"], actor, p["actor_w"].mT)
        return outputs, (critic * p["critic_w"]).sum(-1).add_(p["critic_b"][..., 0])


class AutogradFit(engine._Work):
    """A fit whose gradient is autograd's; target, Adam and average are the library's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.leaves = leaves(self.nets.parameters, self.slots)

    def gradient(self, batch: Batch, numbers: Ints) -> float:
        self.optimiser.gradient.zero_()
        p, shape, error = self.leaves, self.nets.shape, 0.0
        for rows in self.pieces(batch):
            piece = Batch._make(x[rows] for x in batch)
            all_known = self.kept_known
            known = self.known(piece) if all_known is None else all_known.take(torch.from_numpy(numbers[rows]))
            target = self.target(piece, known)
            x, moment = self.nets.inputs(piece.state, piece.t.astype(np.int64))
            h = p["w1_time"].index_select(0, moment)
            h = (h.add_(p["w1"].index_select(0, x)) if shape.n_states else h.addmm_(x, p["w1"])).relu_()
            action = torch.from_numpy(piece.action.astype(np.int64))
            taken = self.nets.apart(h * p["w2"].index_select(0, action)).sum(-1)  # [K, N]
            squares = (taken + p["b2"][:, 0].index_select(1, action) - target).square()
            (squares.sum() / len(batch.t)).backward()  # type: ignore[no-untyped-call]
            error += float(squares.detach().mean()) * len(piece.t) / len(batch.t)
        return error


def leaves(parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same memory as autograd's leaves; `backward` adds their gradients to `gradients`, in place."""
    found = {name: x.detach().requires_grad_() for name, x in parameters.items()}
    for name, leaf in found.items():
        leaf.grad = gradients[name]
    return found


def ppo_sides(case: str) -> Sides:
    """An epoch of minibatches on each side, by one random batch of all groups."""
    shapes, config = PPO_CASES[case]
    names: list[tuple[str | int, ...]] = [("benchmark", group) for group in range(GROUPS)]
    learners: dict[str, ppo.Learner] = {HAND: ppo.Learner(shapes, config, names)}  # type: ignore[arg-type]
    learners |= {name: AutogradLearner(shapes, config, names, tanh) for name, tanh in TANHS.items()}
    batch = ppo_batch(learners[HAND])
    one = replace(config, envs=1, steps=config.batch // config.minibatches, minibatches=1, max_grad_norm=float("inf"))
    found = {}
    for name, learner in learners.items():  # the gradients of one minibatch, not yet clipped
        learner.update, learner.config = 1, one
        learner._epoch({key: x[:, : one.batch].contiguous() for key, x in batch.items()})
        found[name] = {key: x.clone() for key, x in learner.networks.gradients.items()}
        learner.config = config
    compare(case, found)

    def epoch(learner: ppo.Learner) -> int:
        learner._epoch(batch)
        return config.minibatches

    return {name: partial(epoch, learner) for name, learner in learners.items()}


def ppo_batch(learner: ppo.Learner) -> dict[str, Tensor]:
    """One update's batch; ratios and values are spread so that clipping happens in every branch."""
    shapes, config, generator = learner.envs, learner.config, torch.Generator().manual_seed(0)

    def normal(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(GROUPS, config.batch, *shape, generator=generator)

    if shapes.n_states:
        obs = torch.randint(shapes.n_states * shapes.horizon, (GROUPS, config.batch), generator=generator)
    else:
        obs = normal(1.0, shapes.n_features)
    outputs, values = learner.networks.forward(obs)
    if shapes.continuous:
        actions = outputs + normal(1.0, shapes.n_actions)
        log_prob = ppo.gaussian_log_probs(outputs, learner.networks.parameters["log_std"], actions)
    else:
        actions = torch.randint(shapes.n_actions, (GROUPS, config.batch), generator=generator)
        log_prob = torch.log_softmax(outputs, -1).gather(-1, actions[..., None])[..., 0]
    batch = {"obs": obs, "actions": actions, "log_prob": log_prob + normal(0.2)}
    return batch | {"value": values[..., 0] + normal(0.2), "advantage": normal(1.0)}


def fit_sides(case: str, folder: Path) -> Sides:
    """Twenty updates on each side, by random transitions."""
    horizon, n_actions, width, n_states = FIT_CASES[case]
    data = transitions(folder / "transitions.parquet", horizon, n_actions, width, n_states)
    table = stream("benchmark-gradients").dirichlet([1] * n_actions, size=(POLICIES, horizon, max(n_states, 1)))
    small = table.astype(np.float32)

    def weights(states: Any, t: Ints) -> Any:
        return small[:, t, states[:, 0].astype(np.int64) if n_states else 0]

    problem = (data, lambda batch: np.repeat(batch.reward[None], POLICIES, 0), weights, 0, engine.Config(), n_states)
    works = {HAND: engine._Work(*problem), "autograd": AutogradFit(*problem)}
    batches = list(data.numbered(engine.Config().batch, stream("benchmark-gradients"), "train"))[:20]
    found = {}
    for name, work in works.items():
        work.errors.append(work.gradient(batches[0][1], batches[0][0]))
        found[name] = {key: x.clone() for key, x in work.slots.items()}
        work.check()  # as a fit does; frees large blocks, by which glibc sets its thresholds
    compare(case, found)

    def updates(work: engine._Work) -> int:
        for numbers, batch in batches:
            work.gradient(batch, numbers)
            work.optimiser.step(work.rate())
            work.average.flat.lerp_(work.nets.flat, work.follow)
        return len(batches)

    return {name: partial(updates, work) for name, work in works.items()}


def transitions(path: Path, horizon: int, n_actions: int, width: int, n_states: int) -> Transitions:
    """Random rows of the given shape."""
    rng = stream("benchmark-gradients", path.name)

    def states() -> Any:
        return rng.integers(n_states, size=(ROWS, 1)) if n_states else rng.standard_normal((ROWS, width))

    t = rng.integers(horizon, size=ROWS)
    with Writer(path, About("benchmark", horizon, n_actions, width, 0)) as writer:
        writer.write(
            {
                "episode": np.arange(ROWS),
                "t": t,
                "state": states(),
                "action": rng.integers(n_actions, size=ROWS),
                "reward": rng.standard_normal(ROWS),
                "next_state": states(),
                "terminated": t == horizon - 1,
                "truncated": np.zeros(ROWS, dtype=bool),
            }
        )
    return Transitions(path)


def compare(case: str, found: dict[str, dict[str, Tensor]]) -> None:
    """Ends the benchmark if a side's gradients are not the hand-written ones."""
    for name, gradients in found.items():
        for key, mine in found[HAND].items():
            difference = float((gradients[key] - mine).abs().max() / mine.abs().max())
            if not difference <= TOLERANCE:
                sys.exit(f"{case}: {name} differs in {key} by {difference:.1e} of its largest gradient, expected 1e-5")


def measure(case: str, retain: bool) -> dict[str, float]:
    """Median seconds of an update of each side, taking turns; `retain` keeps freed memory in the process."""
    if retain:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks below 32 MB, its largest value, come from the heap
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: the heap's free end is returned from 1 GB on
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sides = ppo_sides(case) if case in PPO_CASES else fit_sides(case, Path(folder))
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for run in sides.values():  # warm-up
            run()
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            for name, run in sides.items():
                start = time.perf_counter()
                updates = run()
                spent[name].append((time.perf_counter() - start) / updates)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def main() -> dict[str, float]:
    rows, out = list[tuple[str, ...]](), dict[str, float]()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as worker:  # a fresh allocator each time
        for case in (*PPO_CASES, *FIT_CASES):
            default, retained = (worker.apply(measure, (case, retain)) for retain in (False, True))
            for name in default:
                if name != HAND:
                    out[f"{case}: {name}, times hand-written"] = retained[name] / retained[HAND]
                cells = [(f"{s[name] * 1e3:.2f} ms", f"{s[name] / s[HAND]:.2f}") for s in (default, retained)]
                rows.append((f"{case}: {name}", *cells[0], *cells[1]))
    header = ("", "glibc's defaults", "ratio", "memory retained", "ratio")
    show("One update; ratios to the hand-written gradient, which autograd's equals to 1e-5", header, rows)
    return out


if __name__ == "__main__":
    main()
