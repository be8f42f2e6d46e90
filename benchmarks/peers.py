"""Per-decision IS and doubly robust returns of ragged episodes against offline_rl_ope's: equal up to rounding.

It imports d3rlpy, which pins an old Gymnasium, so it is installed beside `make bench`'s packages, without dependencies:

    .venv/bin/pip install --constraint constraints.txt --no-deps d3rlpy offline_rl_ope==7.0.0 jaxtyping==0.3.11 \
        wadler_lindig==0.1.8 typeguard==2.13.3
    .venv/bin/python -m benchmarks.peers

typeguard 4 cannot parse its annotations. The numbers it gives for `example(0)` stand in tests/.../test_peers.py.
"""

from typing import Any, NamedTuple

import numpy as np

from benchmarks.show import show
from manyfold.arrays import Array, Ints
from manyfold.estimate import estimators


class Example(NamedTuple):
    """N ragged episodes of one logger; K targets, and a baseline that is no one's q."""

    rewards: Array  # [N, T]
    target_probs: Array  # [K, N, T]
    behavior_probs: Array  # [N, T]
    b_taken: Array  # [K, N, T]
    b_expected: Array  # [K, N, T]
    lengths: Ints


def example(seed: int, policies: int = 2, episodes: int = 4, horizon: int = 5) -> Example:
    """Numbers out of nowhere: an identity must hold for any."""
    rng = np.random.default_rng(seed)
    shape = (policies, episodes, horizon)
    lengths = rng.integers(1, horizon + 1, episodes)
    return Example(
        rng.standard_normal(shape[1:]),
        rng.uniform(0, 1, shape),
        rng.uniform(0.1, 1, shape[1:]),
        rng.standard_normal(shape),
        rng.standard_normal(shape),
        lengths,
    )


def ours(x: Example) -> tuple[Array, Array]:
    """Per-decision IS and doubly robust returns, `[K, N]` each."""
    log_rho = estimators.log_ratios(x.target_probs, x.behavior_probs, x.lengths)
    return (
        estimators.pdis(x.rewards, log_rho, x.lengths),
        estimators.baseline_return(x.rewards, log_rho, x.b_taken, x.b_expected, x.lengths),
    )


def theirs(x: Example) -> tuple[Array, Array]:
    """The same by offline_rl_ope. A policy there is a function of states: here the state is (episode, t)."""
    import torch
    from offline_rl_ope.components.ImportanceSampler import ISWeightOrchestrator
    from offline_rl_ope.components.Policy import Policy
    from offline_rl_ope.OPEEstimators import DirectMethodBase, DREstimator, EmpiricalMeanDenom, ISEstimator
    from offline_rl_ope.OPEEstimators.WeightDenom import PassWeightDenom
    from offline_rl_ope.types import TorchPolicyReturn

    torch.set_default_dtype(torch.float64)
    states = [torch.stack([torch.full((n,), float(i)), torch.arange(n).double()], 1) for i, n in enumerate(x.lengths)]
    actions = [torch.zeros((int(n), 1)) for n in x.lengths]
    rewards = [torch.as_tensor(r[:n, None]) for r, n in zip(x.rewards, x.lengths, strict=True)]

    def at(table: Array, state: Any) -> Any:
        i, t = state.long().T
        return torch.as_tensor(table)[i, t][:, None]

    def policy(table: Array) -> Any:
        return Policy(lambda state, action: TorchPolicyReturn(actions=action, action_prs=at(table, state)))

    class Baseline(DirectMethodBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, taken: Array, expected: Array) -> None:
            self.taken, self.expected = taken, expected

        def calculate_q(self, state: Any, action: Any) -> Any:
            return at(self.taken, state)

        def calculate_v(self, state: Any) -> Any:
            return at(self.expected, state)

    found: tuple[list[Array], list[Array]] = ([], [])
    for target, taken, expected in zip(x.target_probs, x.b_taken, x.b_expected, strict=True):
        weights = ISWeightOrchestrator("per_decision", behav_policy=policy(x.behavior_probs))
        weights.update(states=states, actions=actions, eval_policy=policy(target))
        more: Any = {"empirical_denom": EmpiricalMeanDenom(), "weight_denom": PassWeightDenom()}
        methods = ISEstimator(**more), DREstimator(dm_model=Baseline(taken, expected), **more)
        for method, values in zip(methods, found, strict=True):
            w = weights["per_decision"].traj_is_weights
            returns = method.predict_traj_rewards(rewards, states, actions, w, 1.0, weights.weight_msk)
            values.append(returns.numpy())
    return np.stack(found[0]), np.stack(found[1])


def main() -> None:
    rows = []
    for seed, size in ((0, (2, 4, 5)), (1, (10, 200, 30)), (2, (3, 50, 1))):
        x = example(seed, *size)
        errors = [(np.abs(a - b) / (1 + np.abs(b))).max() for a, b in zip(ours(x), theirs(x), strict=True)]
        if max(errors) > 1e-9:
            raise SystemExit(f"seed {seed}: ours differ from offline_rl_ope's by {max(errors):.2g}, expected rounding")
        rows.append((", ".join(map(str, size)), *(f"{error:.1e}" for error in errors)))
    show("Largest difference from offline_rl_ope, relative", ("K, N, T", "per-decision IS", "doubly robust"), rows)


if __name__ == "__main__":
    main()
