"""PPO against the literal formulas: autograd, torch.nn and torch.optim, one agent at a time."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from manyfold.train import ppo
from manyfold.train.actor_critic import ActorCritic
from manyfold.train.ppo import CONTINUOUS, DISCRETE, Learner, Position
from manyfold.train.vector_envs import GridworldVector, MujocoVector

SMALL = dataclasses.replace(DISCRETE, steps=32, segment_steps=256)
ROBOT = dataclasses.replace(CONTINUOUS, steps=128, minibatches=4, epochs=2, segment_steps=256)


def learner(kind="gridworld", groups=(0, 1, 2), config=None):
    if kind == "gridworld":
        config = config or SMALL
        envs = GridworldVector(4, list(groups), config.envs)
    else:
        config = config or ROBOT
        envs = MujocoVector("inverted-pendulum", list(groups), config.gamma)
    return Learner(envs, config, [(kind, group) for group in groups])


def train(one, updates):
    while one.update < updates:
        one.run_segment(updates, [set()] * one.networks.n_groups, lambda *_: None, lambda: None)
    return one


# --- hyperparameters and returns --------------------------------------------------------------------------------------


def test_the_defaults_are_cleanrls():
    assert dataclasses.asdict(DISCRETE) == {
        "learning_rate": 2.5e-4,
        "total_steps": 500_000,
        "envs": 4,
        "steps": 128,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "minibatches": 4,
        "epochs": 4,
        "clip": 0.2,
        "entropy": 0.01,
        "value": 0.5,
        "max_grad_norm": 0.5,
        "adam_eps": 1e-5,
        "hidden": 64,
        "segment_steps": 10_240,
    }
    changed = {k: v for k, v in dataclasses.asdict(CONTINUOUS).items() if v != dataclasses.asdict(DISCRETE)[k]}
    assert changed == {
        "learning_rate": 3e-4,
        "total_steps": 1_000_000,
        "envs": 1,
        "steps": 2048,
        "minibatches": 32,
        "epochs": 10,
        "entropy": 0.0,
    }


def test_gae_by_hand():
    """gamma = lambda = 0.5; the second step ends an episode, so nothing flows back over it."""
    r, v, done = (torch.tensor(x) for x in ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], [0.0, 1.0, 0.0]))
    # delta_2 = 3 + 0.5 * 4 - 1.5 = 3.5; delta_1 = 2 - 1 = 1; delta_0 = 1 + 0.5 * 1 - 0.5 = 1, A_0 = 1 + 0.25 * 1
    assert ppo.gae(r, v, done, torch.tensor(4.0), 0.5, 0.5).tolist() == [1.25, 1.0, 3.5]


def test_gae_at_lambda_one_is_the_return_minus_the_value():
    rng = torch.Generator().manual_seed(0)
    r, v = torch.randn(6, 2, generator=rng), torch.randn(6, 2, generator=rng)
    v_end = torch.randn(2, generator=rng)
    discounted = sum(0.9**i * r[i] for i in range(6)) + 0.9**6 * v_end
    found = ppo.gae(r, v, torch.zeros(6, 2), v_end, 0.9, 1.0)
    torch.testing.assert_close(found[0], discounted - v[0])


# --- gradients against autograd ---------------------------------------------------------------------------------------


def literal_loss(log_prob, entropy, value, old_log_prob, old_value, advantage, config):
    """CleanRL's loss of one agent, line by line."""
    advantages = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (log_prob - old_log_prob).exp()
    policy = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - config.clip, 1 + config.clip)).mean()
    returns = advantage + old_value
    v_clipped = old_value + torch.clamp(value - old_value, -config.clip, config.clip)
    v_loss = 0.5 * torch.max((value - returns) ** 2, (v_clipped - returns) ** 2).mean()
    return policy - config.entropy * entropy.mean() + config.value * v_loss


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])  # from nothing clipped to most clipped
def test_gradients_equal_autograds_for_softmax(spread):
    rng = torch.Generator().manual_seed(1)
    g, b, a = 3, 64, 4
    logits = torch.randn(g, b, a, generator=rng, dtype=torch.float64).requires_grad_()
    value = torch.randn(g, b, generator=rng, dtype=torch.float64).requires_grad_()
    actions = torch.randint(a, (g, b), generator=rng)
    advantage, old_value, noise = (torch.randn(g, b, generator=rng, dtype=torch.float64) for _ in range(3))
    old_value = value.detach() + spread * old_value
    log_p = torch.log_softmax(logits, -1)
    log_prob = log_p.gather(-1, actions[..., None])[..., 0]
    old = log_prob.detach() + spread * noise
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    loss = sum(
        literal_loss(*(x[i] for x in (log_prob, entropy, value, old, old_value, advantage)), DISCRETE) for i in range(g)
    )
    expected = torch.autograd.grad(loss, (logits, value))
    d_log_prob, d_value = ppo.ppo_gradients(log_prob.detach(), value.detach(), old, old_value, advantage, DISCRETE)
    d_logits = ppo.softmax_gradients(log_p.detach(), actions, d_log_prob, DISCRETE.entropy)
    torch.testing.assert_close(d_logits, expected[0])
    torch.testing.assert_close(d_value, expected[1])


def test_gradients_equal_autograds_for_gaussians():
    rng = torch.Generator().manual_seed(2)
    config = dataclasses.replace(CONTINUOUS, entropy=0.01)
    g, b, a = 2, 32, 3
    mean = torch.randn(g, b, a, generator=rng, dtype=torch.float64).requires_grad_()
    log_std = (0.3 * torch.randn(g, 1, a, generator=rng, dtype=torch.float64)).requires_grad_()
    actions = torch.randn(g, b, a, generator=rng, dtype=torch.float64)
    advantage, value, old_value, noise = (torch.randn(g, b, generator=rng, dtype=torch.float64) for _ in range(4))
    normal = torch.distributions.Normal(mean, log_std.exp().expand_as(mean))
    log_prob = normal.log_prob(actions).sum(-1)
    torch.testing.assert_close(ppo.gaussian_log_probs(mean, log_std, actions), log_prob)
    old = log_prob.detach() + 0.2 * noise
    rest = (normal.entropy().sum(-1), value, old, old_value, advantage)
    loss = sum(literal_loss(log_prob[i], *(x[i] for x in rest), config) for i in range(g))
    expected = torch.autograd.grad(loss, (mean, log_std))
    d_log_prob, _ = ppo.ppo_gradients(log_prob.detach(), value, old, old_value, advantage, config)
    found = ppo.gaussian_gradients(mean.detach(), log_std.detach(), actions, d_log_prob, config.entropy)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def modules(networks, group):
    """One group's actor and critic as plain torch modules."""
    p = networks.parameters
    out = []
    for n, head in ((group, "actor"), (networks.n_groups + group, "critic")):
        w1 = torch.cat([p["w1"][n], p["w1_time"][n]]) if networks.n_states else p["w1"][n]
        layers = [
            (w1.T, p["b1"][n, 0]),
            (p["w2"][n].T, p["b2"][n, 0]),
            (p[f"{head}_w"][group], p[f"{head}_b"][group, 0]),
        ]
        linear = []
        for w, b in layers:
            layer = nn.Linear(w.shape[1], w.shape[0])
            layer.weight.data, layer.bias.data = w.clone(), b.clone()
            linear.append(layer)
        out.append(nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2]))
    return out


def one_hot(networks, obs):
    """What an index stands for: the state's one-hot and t/T."""
    x = torch.zeros(*obs.shape, networks.n_states + 1)
    x.scatter_(-1, (obs % networks.n_states)[..., None], 1.0)
    x[..., -1] = (obs // networks.n_states) / networks.horizon
    return x


@pytest.mark.parametrize("kind", ["gridworld", "robot"])
def test_stacked_networks_equal_torch_modules_forward_and_backward(kind):
    one = train(learner(kind), 1)  # biases are 0 at first
    networks = one.networks
    rng = torch.Generator().manual_seed(0)
    obs = torch.randint(64, (3, 7), generator=rng) if kind == "gridworld" else torch.randn(3, 7, 4, generator=rng)
    outputs, values = networks.forward(obs)
    torch.testing.assert_close(networks.act(obs), outputs, rtol=1e-5, atol=1e-6)
    networks.forward(obs)
    d_outputs, d_values = torch.randn(outputs.shape, generator=rng), torch.randn(values.shape, generator=rng)
    networks.backward(d_outputs, d_values)
    for group in range(3):
        actor, critic = modules(networks, group)
        x = one_hot(networks, obs[group]) if kind == "gridworld" else obs[group]
        torch.testing.assert_close(outputs[group], actor(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[group], critic(x), rtol=1e-5, atol=1e-5)
        ((actor(x) * d_outputs[group]).sum() + (critic(x) * d_values[group]).sum()).backward()
        for n, head, module in ((group, "actor", actor), (3 + group, "critic", critic)):
            grad = networks.gradients
            w1 = torch.cat([grad["w1"][n], grad["w1_time"][n]]) if networks.n_states else grad["w1"][n]
            pairs = [(w1, module[0].weight.grad.T), (grad["w2"][n], module[2].weight.grad.T)]
            pairs += [(grad["b1"][n, 0], module[0].bias.grad), (grad["b2"][n, 0], module[2].bias.grad)]
            pairs += [(grad[f"{head}_w"][group], module[4].weight.grad)]
            pairs += [(grad[f"{head}_b"][group, 0], module[4].bias.grad)]
            for found, expected in pairs:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_initial_weights_are_orthogonal_and_biases_zero():
    networks = learner("robot").networks
    for name, gain in (("w2", 2**0.5), ("actor_w", 0.01), ("critic_w", 1.0)):
        for w in networks.parameters[name]:
            rows = w if w.shape[0] <= w.shape[1] else w.T
            torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-5)
    w1 = networks.parameters["w1"][0]  # [4, 64]
    torch.testing.assert_close(w1 @ w1.T, 2 * torch.eye(4), rtol=1e-4, atol=1e-5)
    assert all((networks.parameters[name] == 0).all() for name in ("b1", "b2", "actor_b", "critic_b", "log_std"))
    assert not torch.equal(networks.parameters["w2"][0], networks.parameters["w2"][1])


def test_gradient_norms_are_clipped_group_by_group():
    networks = learner().networks
    torch.manual_seed(0)
    networks.flat_grad.normal_()
    for grad in networks.gradients.values():  # group 0 small, group 2 large
        grad.mul_(torch.tensor([1e-4, 1.0, 9.0]).repeat(len(grad) // 3)[:, None, None])
    before = {name: grad.clone() for name, grad in networks.gradients.items()}
    networks.clip_gradients(0.5)
    for group in range(3):
        mine = [group, 3 + group]
        parts = [
            torch.cat([x[mine].flatten() if len(x) == 6 else x[group].flatten() for x in y.values()])
            for y in (before, networks.gradients)
        ]
        plain = torch.zeros_like(parts[0]).requires_grad_()
        plain.grad = parts[0].clone()
        nn.utils.clip_grad_norm_([plain], 0.5)
        torch.testing.assert_close(parts[1], plain.grad)


@pytest.mark.parametrize("kind", ["gridworld", "robot"])
def test_one_update_equals_a_literal_implementation(kind):
    """The same batch and permutations through torch.nn, autograd, clip_grad_norm_ and torch.optim.Adam."""
    one = learner(kind)
    config, networks = one.config, one.networks
    references = []
    for group in range(3):
        actor, critic = modules(networks, group)
        log_std = nn.Parameter(torch.zeros(1, networks.parameters["log_std"].shape[-1])) if kind == "robot" else None
        parameters = [*actor.parameters(), *critic.parameters(), *([log_std] if kind == "robot" else [])]
        references.append(
            (actor, critic, log_std, torch.optim.Adam(parameters, lr=config.learning_rate, eps=1e-5), parameters)
        )
    orders = []
    obs = one.envs.start(0)
    one.update = 1
    _, batch = one._rollout(obs)
    batch = {name: x.clone() for name, x in batch.items()}
    real = [rng.bit_generator.state for rng in one.rngs]
    for _ in range(config.epochs):
        orders.append(np.stack([rng.permutation(config.batch) for rng in one.rngs]))
    for rng, state in zip(one.rngs, real, strict=True):
        rng.bit_generator.state = state
    for _ in range(config.epochs):
        one._epoch(batch)

    size = config.batch // config.minibatches
    for group, (actor, critic, log_std, optimiser, parameters) in enumerate(references):
        for order in orders:
            for start in range(0, config.batch, size):
                index = torch.from_numpy(order[group][start : start + size])
                part = {name: x[group][index] for name, x in batch.items()}
                x = one_hot(networks, part["obs"]) if kind == "gridworld" else part["obs"]
                if kind == "gridworld":
                    policy = torch.distributions.Categorical(logits=actor(x))
                    log_prob, entropy = policy.log_prob(part["actions"]), policy.entropy()
                else:
                    policy = torch.distributions.Normal(actor(x), log_std.exp().expand(size, -1))
                    log_prob, entropy = policy.log_prob(part["actions"]).sum(-1), policy.entropy().sum(-1)
                loss = literal_loss(
                    log_prob, entropy, critic(x)[:, 0], part["log_prob"], part["value"], part["advantage"], config
                )
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                optimiser.step()
        for found, expected in zip(modules(networks, group), (actor, critic), strict=True):
            for x, y in zip(found.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5)
        if kind == "robot":
            torch.testing.assert_close(networks.parameters["log_std"][group], log_std, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["gridworld", "robot"])
def test_a_rollout_equals_a_literal_one(kind):
    """Actions from the group's own noise, values by torch modules, advantages by CleanRL's loop, ends inside."""
    one = learner(kind)
    config, networks = one.config, one.networks
    if kind == "robot":
        networks.parameters["log_std"].fill_(-0.7)
    obs = one.envs.start(0)
    states = [rng.bit_generator.state for rng in one.rngs]
    taken, step = [], one.envs.step

    def recorded(actions):
        result = step(actions)
        taken.append((actions.copy(), *(x.copy() for x in result)))
        return result

    one.envs.step = recorded
    seen = [obs.copy()]
    _, batch = one._rollout(obs)
    seen += [after for _, after, _, _ in taken]
    assert any(done.any() for *_, done in taken[:-1])
    for group in range(3):
        actor, critic = modules(networks, group)
        rng = np.random.Generator(np.random.PCG64())
        rng.bit_generator.state = states[group]
        if kind == "gridworld":
            noise = rng.random((config.steps, config.envs), dtype=np.float32)
        else:
            noise = rng.standard_normal((config.steps, config.envs, 1), dtype=np.float32)
        values = []
        for t, x in enumerate(seen):
            mine = torch.from_numpy(x[group])
            features = one_hot(networks, mine) if kind == "gridworld" else mine
            values.append(critic(features)[:, 0].detach())
            if t == config.steps:
                break
            out = actor(features).detach()
            if kind == "gridworld":
                expected = (torch.from_numpy(noise[t])[:, None] >= torch.softmax(out, -1).cumsum(-1)[:, :-1]).sum(-1)
                np.testing.assert_array_equal(taken[t][0][group], expected)
            else:
                np.testing.assert_allclose(taken[t][0][group], out.numpy() + np.exp(-0.7) * noise[t], 1e-4, 1e-5)
        last = torch.zeros(config.envs)
        advantages = []
        for t in reversed(range(config.steps)):
            alive = 1 - torch.from_numpy(taken[t][3][group].astype(np.float32))
            delta = torch.from_numpy(taken[t][2][group]) + config.gamma * values[t + 1] * alive - values[t]
            last = delta + config.gamma * config.gae_lambda * alive * last
            advantages.append(last)
        torch.testing.assert_close(
            batch["advantage"][group], torch.stack(advantages[::-1]).flatten(), rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(batch["value"][group], torch.stack(values[:-1]).flatten(), rtol=1e-3, atol=1e-4)


def test_the_learning_rate_falls_linearly():
    one = learner(config=dataclasses.replace(SMALL, total_steps=128 * 10))
    rates = []
    step = one.optimiser.step
    one.optimiser.step = lambda rate: (rates.append(rate), step(rate))
    train(one, 3)
    per_update = SMALL.epochs * SMALL.minibatches
    np.testing.assert_allclose(rates[::per_update], 2.5e-4 * np.array([1.0, 0.9, 0.8]))


# --- groups are independent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gridworld", "robot"])
def test_a_batch_of_groups_equals_separate_runs(kind):
    together = train(learner(kind, (0, 1, 2)), 3)
    for i in range(3):
        alone = train(learner(kind, (i,)), 3)
        for name, x in alone.networks.parameters.items():
            both = together.networks.parameters[name]
            mine = both[[i, 3 + i]] if len(both) == 6 else both[[i]]
            assert torch.equal(x, mine), name  # to the last bit: shards may be cut anywhere


def test_a_group_does_not_depend_on_its_neighbours():
    first, second = (train(learner("gridworld", groups), 3) for groups in ((0, 1, 2), (5, 1, 7)))
    for name in ("w1", "w2", "actor_w"):
        assert torch.equal(first.networks.parameters[name][1], second.networks.parameters[name][1])
    assert not torch.equal(first.networks.parameters["w2"][0], second.networks.parameters["w2"][0])


def test_many_states_and_few_take_the_same_path_through_training():
    """The look-up table is only a short cut: forced off, the same updates come out."""
    quick, plain = train(learner(), 2), learner()
    plain.envs.n_features = 10**6  # too many states for a table; the networks keep the true horizon
    train(plain, 2)
    torch.testing.assert_close(quick.networks.flat, plain.networks.flat, rtol=1e-4, atol=1e-5)


# --- saving and recording ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gridworld", "robot"])
def test_an_interrupted_training_goes_on_with_the_same_numbers(kind):
    whole = train(learner(kind), 4)
    first = train(learner(kind), 2)  # a segment is two updates
    tensors, text = first.save()
    second = learner(kind)
    second.load({name: x.clone() for name, x in tensors.items()}, text)
    assert second.update == 2
    train(second, 4)
    assert torch.equal(whole.networks.flat, second.networks.flat)
    for name, x in whole.envs.normaliser().items():
        assert np.array_equal(x, second.envs.normaliser()[name])


def test_actors_are_recorded_at_the_positions_asked_for():
    one = learner()
    wanted = [{Position(0, 0), Position(2, 1)}, {Position(2, 1)}, set()]
    found = {}
    while one.update < 2:
        one.run_segment(2, wanted, lambda p, groups, t: found.setdefault(p, (groups, t)), lambda: None)
    assert {p: groups for p, (groups, _) in found.items()} == {Position(0, 0): [0], Position(2, 1): [0, 1]}
    initial = learner().networks.actors([0])
    for name, x in found[Position(0, 0)][1].items():
        assert torch.equal(x, initial[name])
    after = one.networks.actors([0, 1])
    assert not torch.equal(found[Position(2, 1)][1]["w2"], after["w2"])  # three more epochs followed


def test_training_improves_the_policy():
    config = dataclasses.replace(DISCRETE, learning_rate=2.5e-3, total_steps=50_000)
    one = learner("gridworld", range(4), config)
    one.envs.start(0)
    train(one, 1)
    before = one.envs.mean_returns().mean()
    train(one, 30)
    assert one.envs.mean_returns().mean() > before + 1.0


def test_an_actor_critic_needs_no_autograd():
    assert not any(
        p.requires_grad for p in ActorCritic(GridworldVector(2, [0], 1), 8, [torch.Generator()]).parameters.values()
    )
