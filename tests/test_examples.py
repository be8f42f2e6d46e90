"""Each example as a person runs it, at a small size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import manyfold as mf

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^(.+?)  +(-?[\d.]+)  +(-?[\d.]+) to (-?[\d.]+)  ", re.MULTILINE)  # policy, value, interval


def run(name, *arguments, folder):
    """What an example printed; its files go below `folder`."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ranked(said):
    """Names, values and intervals of the table, in its order."""
    rows = TABLE.findall(said)
    return [name for name, *_ in rows], np.array([[float(x) for x in numbers] for _, *numbers in rows])


def check_page(path, names, said):
    """The page has every policy, and the verdict that was printed."""
    page = path.read_text()
    assert all(name in page for name in names)
    (verdict,) = re.findall(r"^(\S.* is the best|Not known which is best)", said, re.MULTILINE)
    assert verdict in page


def test_cartpole_goes_from_training_to_the_page(tmp_path):
    said = run("cartpole", "--steps", 192, "--every", 64, "--update", 64, "--episodes", 30, folder=tmp_path)
    names, values = ranked(said)
    assert sorted(names) == ["ppo_128_steps", "ppo_192_steps", "ppo_64_steps"]
    assert (np.diff(values[:, 0]) <= 0).all()
    assert ((values[:, 1] < values[:, 0]) & (values[:, 0] < values[:, 2])).all()
    assert "\n30 episodes, " in said
    assert {path.stem for path in (tmp_path / "cartpole" / "checkpoints").iterdir()} == set(names)
    check_page(tmp_path / "cartpole" / "report.html", names, said)


def test_hopper_has_three_dimensions_and_each_policys_own_statistics(tmp_path):
    said = run("hopper", "--steps", 256, "--every", 128, "--update", 128, "--episodes", 20, folder=tmp_path)
    assert "2 policies; actions of 3 dimensions, from (-1.0, -1.0, -1.0) to (1.0, 1.0, 1.0)" in said
    for step in (128, 256):
        assert f"ppo_{step}_steps: normalised by ppo_vecnormalize_{step}_steps.pkl\n" in said
    names, _ = ranked(said)
    assert sorted(names) == ["ppo_128_steps", "ppo_256_steps"]
    check_page(tmp_path / "hopper" / "report.html", names, said)
    checkpoints = tmp_path / "hopper" / "checkpoints"
    with_statistics, without = (mf.load_policies(checkpoints, normaliser=x) for x in ("beside", "none"))
    obs = np.random.default_rng(0).standard_normal((5, 11))
    assert np.abs(with_statistics.parameters(obs, 0) - without.parameters(obs, 0)).max() > 0.01


def test_an_own_environments_values_are_those_of_plain_episodes(tmp_path):
    days, arguments = 7, ("--days", 7, "--episodes", 200)
    said = run("own_environment", *arguments, folder=tmp_path)
    names, values = ranked(said)
    assert sorted(names) == ["network 0", "network 1", "network 2", "up to 3", "up to 5"]
    check_page(tmp_path / "shop.html", names, said)
    assert run("own_environment", *arguments, "--workers", 2, folder=tmp_path) == said  # same seed, same result
    returns = plain_returns(days, target=3, episodes=400)
    width = (values[names.index("up to 3"), 2] - values[names.index("up to 3"), 1]) / 2
    error = 4 * returns.std() / np.sqrt(len(returns))
    assert abs(returns.mean() - values[names.index("up to 3"), 0]) < 2 * width + error


def plain_returns(days, target, episodes):
    """Of "order up to", one step at a time, in the example's environment."""
    names: dict[str, object] = {"__name__": "own_environment"}
    exec((ROOT / "examples" / "own_environment.py").read_text(), names)
    env, rng, out = names["Shop"](days), np.random.default_rng(0), []
    assert isinstance(env, gymnasium.Env)
    for seed in range(episodes):
        (obs, _), ended, total = env.reset(seed=seed), False, 0.0
        while not ended:
            order = int(np.clip(target - round(obs[0] * 10), 0, 4)) if rng.random() < 0.9 else int(rng.integers(5))
            obs, reward, ended, _, _ = env.step(order)
            total += reward
        out.append(total)
    return np.array(out)


def test_while_training_later_checkpoints_need_fewer_episodes(tmp_path):
    sizes = "--checkpoints", 4, "--every", 64, "--update", 64, "--precision", 3
    said = run("while_training", *sizes, folder=tmp_path)
    lines = re.findall(r"^ppo_(\d+)_steps: .* \+- ([\d.]+); (\d+) episodes run, (\d+) were there$", said, re.MULTILINE)
    steps, width, ran, there = np.array(lines, dtype=float).T
    assert steps.tolist() == [64, 128, 192, 256]
    assert (width <= 3).all()
    assert there.tolist() == [0, *np.cumsum(ran)[:-1]]
    assert (ran[1:] < ran[0]).all()  # alone, each would need about as many as the first
    names, _ = ranked(said)
    assert sorted(names) == sorted(f"ppo_{step:.0f}_steps" for step in steps)
    assert f"; {ran.sum():.0f} stored episodes" in said


def test_a_store_that_is_there_is_not_counted_as_new(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(AssertionError, match="there is there already, expected a new folder"):
        run("while_training", "--folder", "there", folder=tmp_path)


def test_the_examples_are_all_of_them():
    """Each has a test of its own, and starts nothing when imported by another process."""
    found = sorted((ROOT / "examples").glob("*.py"))
    assert [path.stem for path in found] == ["cartpole", "hopper", "own_environment", "while_training"]
    assert all('\nif __name__ == "__main__":' in path.read_text() for path in found)
