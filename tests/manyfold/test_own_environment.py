"""A user's own Gymnasium environment through the library alone: logged data, q and q_hat, mu, episodes, estimates."""

import gymnasium
import numpy as np
import pytest
import torch

from manyfold import behavior, estimators, fqe
from manyfold.networks import NetworkPolicySet, Spec
from manyfold.transitions import About, Transitions, Writer

K, T, HIDDEN = 4, 20, 8


def policies(width, actions, seed):
    """K random softmax policies, near to one another."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (width, HIDDEN), "b1": (1, HIDDEN), "w2": (HIDDEN, HIDDEN), "b2": (1, HIDDEN)}
    shapes |= {"w3": (HIDDEN, actions), "b3": (1, actions)}
    tensors = {}
    for name, shape in shapes.items():
        base, own = torch.randn(1, *shape, generator=generator), torch.randn(K, *shape, generator=generator)
        tensors[name] = 0.5 * base + 0.1 * own
    return NetworkPolicySet(tensors, Spec("own", "softmax", T, actions, 0, width, 0.0, 0.0, tuple("abcd")))


def episodes_of(env, choose, episodes, rng):
    """Literal episodes: states, actions, rewards, probabilities `choose(state, t)` and ends, one list for each."""
    out = []
    for _ in range(episodes):
        state, _ = env.reset(seed=int(rng.integers(2**31)))
        rows = []
        for t in range(T):
            probs = choose(state, t)
            action = int(rng.choice(len(probs), p=probs))
            after, reward, terminated, _, _ = env.step(action)
            rows.append((t, state, action, reward, after, terminated, t == T - 1 and not terminated, probs[action]))
            if terminated:
                break
            state = after
        out.append(rows)
    return out


@pytest.mark.parametrize(("name", "seed"), [("CartPole-v1", 0), ("MountainCar-v0", 1), ("Acrobot-v1", 2)])
def test_every_step_works_and_the_estimates_are_right(name, seed, tmp_path):
    env, rng = gymnasium.make(name), np.random.default_rng(seed)
    width, actions = env.observation_space.shape[0], int(env.action_space.n)
    targets = policies(width, actions, seed)
    # logged by a noisy mixture of the targets, written as Parquet
    logged = episodes_of(env, lambda s, t: 0.5 * targets.probs(s[None], t).mean(0)[0] + 0.5 / actions, 300, rng)
    about = About(env=name, horizon=T, n_actions=actions, width=width, seed=0)
    with Writer(tmp_path / "transitions.parquet", about) as writer:
        for i, rows in enumerate(logged):
            t, state, action, reward, after, terminated, truncated, _ = (np.array(x) for x in zip(*rows, strict=True))
            columns = {"episode": np.full(len(t), i), "t": t, "state": state, "action": action, "reward": reward}
            writer.write(columns | {"next_state": after, "terminated": terminated, "truncated": truncated})
    data = Transitions(tmp_path)
    # q, q_hat and mu
    config = fqe.Config(hidden=16, learning_rate=0.01, batch=256, updates_per_step=20, average=0.95, patience=20)
    q = fqe.fit(data, lambda b: np.tile(b.reward, (K, 1)), targets.probs, np.random.default_rng(0), config).nets

    def r_hat(batch):
        taken = q.predict(batch.state, batch.t)[:, np.arange(len(batch.t)), batch.action]
        return 2 * batch.reward * taken - batch.reward**2

    q_hat = fqe.fit(data, r_hat, targets.probs, np.random.default_rng(1), config).nets
    plan = behavior.Behavior(targets, q, q_hat)
    # 400 episodes of mu estimate every target, within their errors of what each gives by itself
    run = episodes_of(env, lambda s, t: plan.mu(s[None], t)[0], 400, rng)
    lengths = np.array([len(rows) for rows in run])
    steps = [step for rows in run for step in rows]
    t, state, action, reward, *_, own = (np.array(x) for x in zip(*steps, strict=True))
    pi = targets.probs(state, t)[:, np.arange(len(t)), action]
    log_rho = estimators.log_ratios(estimators.pad(pi, lengths), estimators.pad(own, lengths), lengths)
    found = estimators.estimate(estimators.pdis(estimators.pad(reward, lengths), log_rho, lengths))
    for k in range(K):
        alone = episodes_of(env, lambda s, t, k=k: targets.probs(s[None], t)[k, 0], 200, rng)
        returns = [sum(step[3] for step in rows) for rows in alone]
        error = np.hypot(found.standard_error[k], np.std(returns, ddof=1) / np.sqrt(200))
        assert abs(found.mean[k] - np.mean(returns)) < 4 * error + 1e-9
