"""`manyfold check`: what is planted is found, in one line, and what is right passes."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from manyfold.cli import main
from manyfold.envs import Gridworld, GymnasiumEnvironment
from manyfold.policies import CallablePolicySet, ModulePolicySet, TabularPolicySet
from manyfold.policies.actors import ActorSet
from manyfold.policies.base import sample_actions
from manyfold.policies.checking import LEVELS, check
from manyfold.policies.heads import Gaussian
from manyfold.policies.imported import Imported
from manyfold.policies.layers import FixedStd, StateDependentNoise
from manyfold.policies.loading import load_policies
from manyfold.policies.probing import PROBES, probe
from tests.networks import mlp_policies

CARTPOLE = GymnasiumEnvironment("CartPole-v1", horizon=100)
PENDULUM = GymnasiumEnvironment("Pendulum-v1")
BOX = Gaussian((-2.0,), (2.0,))


def leaning(gain):
    def probs(obs, t):
        right = 1 / (1 + np.exp(-gain * (obs[:, 2] + obs[:, 3])))
        return np.stack([1 - right, right], -1)

    return probs


def callables(*functions):
    return CallablePolicySet(functions, 2, 4)


def normal(seed, log_std=-1.0):
    torch.manual_seed(seed)
    return FixedStd(nn.Linear(3, 1), torch.full((1,), log_std))


def lines(found, *levels):
    """The texts of these levels; every finding is one line, sorted by level, and only the last is ok."""
    said = [finding.level for finding in found]
    assert said == sorted(said, key=LEVELS.index)
    assert all("\n" not in str(finding) and str(finding).startswith(f"{finding.level}: ") for finding in found)
    return [finding.text for finding in found if finding.level in (levels or LEVELS[:2])]


def test_right_policies_pass_and_the_last_line_says_what_was_checked():
    found = check(CARTPOLE, callables(leaning(0.5), leaning(1), leaning(3)))
    assert lines(found) == []
    (ok,) = lines(found, "ok")
    assert ok.startswith("checked 3 policies (stochastic) in CartPole-v1: ")
    assert "4,096 draws of each; it took 399 steps of " in ok
    assert ok.endswith("short episodes, which is no evaluation")


def test_the_same_seed_gives_the_same_findings():
    policies = ModulePolicySet([normal(0), normal(1)], BOX, 3)
    assert check(PENDULUM, policies, 3) == check(PENDULUM, policies, 3)


@pytest.mark.parametrize("k", [1, 7, 150])
def test_probes_are_a_few_steps_of_every_policy(k):
    policies = callables(*[leaning(gain) for gain in np.linspace(0, 1, k)])
    found = probe(CARTPOLE, policies, 0)
    assert np.bincount(found.which).tolist() == [max(4, PROBES // k)] * k
    assert len(found.places) <= 64
    assert found.obs.shape == (len(found.t), 4)
    assert (found.t == 0).sum() == found.episodes


def test_tables_and_own_networks_pass():
    tables = np.random.default_rng(1).dirichlet(np.ones(4), (3, 5, 25))
    assert lines(check(Gridworld.draw(5, 0), TabularPolicySet(tables))) == []
    own = mlp_policies(horizon=100, n_actions=2, n_features=4, normalised=True)
    assert lines(check(CARTPOLE, own)) == []


def test_policies_of_another_environment_are_one_error():
    assert lines(check(GymnasiumEnvironment("Acrobot-v1"), callables(leaning(1)))) == [
        "the policies take observations of 4 numbers, those of Acrobot-v1 have 6; is it the environment they were "
        "trained in, with the same wrappers?"
    ]


class Other(CallablePolicySet):
    """Its own sampler: of other probabilities than it tells."""

    def sample(self, which, obs, t, rng):
        probs = self.probs(obs, t)
        heated = np.sqrt(probs)
        chosen = np.where(which[:, None] == 1, heated[1] / heated[1].sum(-1, keepdims=True), probs[0])
        return sample_actions(chosen, rng)


def test_actions_sampled_at_another_temperature_are_found_and_their_policy_named():
    (text,) = lines(check(CARTPOLE, Other([leaning(1), leaning(6)], 2, 4)), "error")
    assert text.startswith("policy 1: its density does not fit its 4,096 draws: the mean ratio to a copy of itself (")


class TooWide(Gaussian):
    def draw(self, parameters, rng):
        return super().draw(parameters + np.array([0, 0.3]), rng)


def test_a_deviation_that_is_off_by_0_3_is_found():
    policies = ModulePolicySet([normal(0), normal(1)], TooWide(BOX.low, BOX.high), 3)
    errors = lines(check(PENDULUM, policies), "error")
    assert [text.split(":")[0] for text in errors] == ["policy 0", "policy 1"]
    assert lines(check(PENDULUM, ModulePolicySet(policies.modules, BOX, 3)), "error") == []


class Memory:
    """Leans to where it leaned before."""

    def __init__(self):
        self.state = 0.0

    def __call__(self, obs, t):
        right = np.empty(len(obs))
        for i in range(len(obs)):
            self.state = 0.9 * self.state + obs[i, 2]
            right[i] = 1 / (1 + np.exp(-10 * self.state))
        return np.stack([1 - right, right], -1)


class Rows(CallablePolicySet):
    def probs_of(self, which, obs, t):
        return self.probs(obs, t)[0]


def test_a_policy_that_remembers_is_found():
    (text,) = lines(check(CARTPOLE, callables(leaning(1), Memory())), "error")
    assert text.startswith("policy 1: asked again at the same observations, other probabilities; ")


def test_rows_of_another_policy_are_found():
    errors = lines(check(CARTPOLE, Rows([leaning(1), leaning(6)], 2, 4)), "error")
    assert errors[0].startswith("policy 1: asked again at the same observations, other probabilities; ")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.cell(x[:, None])[0][:, 0])


def test_recurrent_layers_and_gsde_are_said():
    torch.manual_seed(0)
    (text,) = lines(check(CARTPOLE, ModulePolicySet([Recurrent(), nn.Linear(4, 2)], 2, 4)))
    assert text.startswith("policy 0: recurrent layers, whose memory is not carried")
    noise = StateDependentNoise(nn.Linear(3, 4), nn.Linear(4, 1), torch.zeros(4, 1), False)
    found = check(PENDULUM, ModulePolicySet([normal(0), noise], BOX, 3))
    assert lines(found) == []
    assert any(text.startswith("policy 1: gSDE, whose noise is drawn afresh") for text in lines(found, "note"))


def test_the_clipped_share_is_the_normals_tail():
    """Means of 0, deviations of 2 and 1, bounds of 2: 2 Phi(-1) = 32% and 2 Phi(-2) = 5% are clipped."""
    modules = [normal(0, np.log(2)), normal(0, 0.0)]
    for module in modules:
        for x in module.mean.parameters():
            nn.init.zeros_(x)
    found = check(PENDULUM, ModulePolicySet(modules, BOX, 3))
    (text,) = (text for text in lines(found, "note") if "clipped" in text)
    shares = [float(part.split("%")[0].split()[-1]) for part in text.split(";")[0].split(",")]
    assert shares == pytest.approx([31.7, 4.6], abs=2.5)


def test_bounds_of_another_environment_are_a_warning():
    (text,) = lines(check(PENDULUM, ModulePolicySet([normal(0)], Gaussian((-1.0,), (1.0,)), 3)))
    assert text == "policy 0: actions from -1 to 1, Pendulum-v1 takes -2 to 2; is a wrapper of training missing?"


def test_identical_policies_and_deterministic_ones_are_said():
    (text,) = lines(check(CARTPOLE, callables(leaning(1), leaning(2), leaning(1))))
    assert text == "policy 0, policy 2: the same probabilities at every probe; one of them is enough"

    def right(obs, t):
        return np.tile([0.0, 1.0], (len(obs), 1))

    found = check(CARTPOLE, callables(leaning(1), right))
    assert lines(found) == []
    assert [text.split(",")[0] for text in lines(found, "note")] == ["policy 1: deterministic"]


def test_actors_are_told_what_no_density_costs():
    actors = ActorSet([lambda obs, t: (obs[:, 2] > 0).astype(np.int64)], ["only acts"], "greedy", 4)
    found = check(CARTPOLE, actors)
    assert lines(found) == []
    assert lines(found, "note")[0].startswith("only acts: greedy, no densities: plain returns from common starts")


@pytest.mark.parametrize(
    ("env", "policies", "line"),
    [
        (CARTPOLE, callables(leaning(1), lambda obs, t: leaning(np.nan)(obs, t)), "policy 1.*is nan, expected"),
        (CARTPOLE, callables(lambda obs, t: 1 / 0), "policy 0 failed at an observation.*: ZeroDivisionError: "),
        (CARTPOLE, ActorSet([lambda obs, t: np.array([0.5])]), "policy 0 gave array.*expected Discrete"),
        (PENDULUM, ActorSet([lambda obs, t: np.array([[np.nan]])]), "policy 0 gave array.*nan.*expected Box"),
        (PENDULUM, ModulePolicySet([normal(0, np.nan)], BOX, 3), "policy 0.*gave NaN or infinity"),
    ],
)
def test_a_policy_that_fails_is_one_error(env, policies, line):
    (text,) = lines(check(env, policies), "error")
    assert re.search(line, text)
    assert text.endswith("; nothing more could be checked")


# The environment


class Bounded(gymnasium.Env):
    """Observations of four numbers; what goes wrong is told."""

    observation_space, action_space = spaces.Box(-9, 9, (4,)), spaces.Discrete(2)

    def __init__(self, wrong="", ends=True):
        self.wrong, self.ends = wrong, ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        if self.wrong == "reset":
            raise RuntimeError("no simulator\nat this address")
        rng = np.random.default_rng() if self.wrong == "start" else self.np_random
        return rng.standard_normal(4).clip(-9, 9), {}

    def step(self, action):
        self.steps += 1
        if self.wrong == "step" and self.steps == 3:
            raise KeyError("joint")
        rng = np.random.default_rng() if self.wrong == "noise" else self.np_random
        return rng.standard_normal(4).clip(-9, 9), 1.0, self.ends and self.steps == 5, False, {}


def bounded(wrong="", ends=True):
    return GymnasiumEnvironment(lambda: Bounded(wrong, ends), 1000, "bounded")


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ("start", "bounded: reset(seed=...) gives another start with the same seed; "),
        ("noise", "bounded: after 1 steps the same actions led elsewhere with the same seed; "),
    ],
)
def test_an_environment_that_its_seed_does_not_repeat_is_a_warning(wrong, where):
    (text,) = lines(check(bounded(wrong), callables(leaning(1), leaning(2))))
    assert text.startswith(where)


def test_episodes_that_do_not_end_are_a_note():
    """Unless the environment itself ends them there."""
    assert lines(check(bounded(), callables(leaning(1))), "note") == []
    (text,) = lines(check(bounded(ends=False), callables(leaning(1))), "note")
    assert text.startswith(
        "bounded: no episode ended by itself within 400 steps; the horizon ends all of them after 1,000"
    )
    limited = GymnasiumEnvironment(lambda: gymnasium.wrappers.TimeLimit(Bounded("", False), 1000), name="bounded")
    assert lines(check(limited, callables(leaning(1))), "note") == []


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("reset", r"bounded: reset failed inside of the environment \(RuntimeError: no simulator at this address\)"),
        ("step", r"bounded: step 3 of an episode failed inside of the environment \(KeyError: 'joint'\)"),
    ],
)
def test_an_environment_that_crashes_is_the_callers_one_line(wrong, line):
    with pytest.raises(ValueError, match=f"^{line}, expected it to run$"):
        check(bounded(wrong), callables(leaning(1)))


# Files of Stable-Baselines3, and the command


@pytest.fixture(scope="module")
def zips(tmp_path_factory):
    """Untrained networks: CartPole's two PPO, Pendulum's PPO with and without gSDE, and TD3."""
    from stable_baselines3 import PPO, TD3

    folder = tmp_path_factory.mktemp("zips")
    for seed in (1, 2):
        PPO("MlpPolicy", "CartPole-v1", seed=seed, device="cpu").save(folder / f"cartpole_{seed}_steps.zip")
    PPO("MlpPolicy", "Pendulum-v1", seed=1, device="cpu").save(folder / "ppo.zip")
    PPO("MlpPolicy", "Pendulum-v1", seed=2, device="cpu", use_sde=True).save(folder / "sde.zip")
    TD3("MlpPolicy", "Pendulum-v1", seed=3, device="cpu", buffer_size=1).save(folder / "td3.zip")
    return folder


def statistics(path, mean, var=1.0):
    np.savez(path, mean=np.full(4, mean), var=np.full(4, var), clip=5.0, epsilon=1e-8)


def copied(zips, folder):
    """CartPole's two policies in a folder of their own."""
    names = ["cartpole_1_steps", "cartpole_2_steps"]
    for name in names:
        (folder / f"{name}.zip").write_bytes((zips / f"{name}.zip").read_bytes())
    return [folder / f"{name}.normalizer.npz" for name in names]


def test_notes_of_files_are_one_line_for_all_of_them(zips):
    found = check(CARTPOLE, load_policies(zips / "cartpole*.zip"))
    assert lines(found) == []
    (text,) = lines(found, "note")
    assert text.startswith("both policies: no normaliser found")


def test_notes_are_grouped_where_only_their_files_names_differ():
    def one(step, epsilon):
        notes = f"epsilon {epsilon}, as the file says", f"observations normalised by dqn_{step}_steps.npz"
        file, network = Path(f"dqn_{step}_steps.zip"), torch.nn.Linear(4, 2)
        return Imported(f"at {step}", file, "sb3 DQN", 2, 4, network, sha256=(str(step),), notes=notes)

    policies = callables(leaning(1), leaning(2), leaning(3))
    policies.imported = (one(100, 0.5), one(200, 0.5), one(1000, 0.3))
    assert lines(check(CARTPOLE, policies), "note") == [
        "at 100, at 200: epsilon 0.5, as the file says",
        "all 3 policies: observations normalised by dqn_100_steps.npz (and so on, each by its own)",
        "at 1000: epsilon 0.3, as the file says",
    ]


def test_cleanrls_continuous_ppo_without_its_statistics_is_a_warning(tmp_path):
    """Its script trains under NormalizeObservation: without the statistics it is another policy."""
    sizes, weights = {0: (8, 3), 2: (8, 8), 4: (1, 8)}, {"actor_logstd": torch.zeros(1, 1)}
    for i, shape in sizes.items():
        weights |= {f"actor_mean.{i}.weight": 0.1 * torch.ones(shape), f"actor_mean.{i}.bias": torch.zeros(shape[0])}
    torch.save(weights, tmp_path / "ppo.cleanrl_model")
    (text,) = lines(check(PENDULUM, load_policies(tmp_path)))
    assert text.startswith("ppo: no normaliser beside it: ppo_continuous_action.py trains under NormalizeObservation")
    assert "ppo.normalizer.npz" in text
    (tmp_path / "twin.cleanrl_model").write_bytes((tmp_path / "ppo.cleanrl_model").read_bytes())
    texts = lines(check(PENDULUM, load_policies(tmp_path)))  # the environment's bounds complete them
    assert sum("the same" in text for text in texts) == 1


def test_gsde_of_a_file_and_what_has_no_density(zips):
    notes = lines(check(PENDULUM, load_policies([zips / "ppo.zip", zips / "sde.zip"])), "note")
    assert sum("gSDE" in text for text in notes) == 1
    assert any(text.startswith("sde: gSDE") for text in notes)
    notes = lines(check(PENDULUM, load_policies([zips / "ppo.zip", zips / "td3.zip"])), "note")
    assert any(text.startswith("td3: TD3 and DDPG have no density") for text in notes)
    (text,) = [text for text in notes if "plain returns from common starts" in text]
    assert "--greedy" not in text  # TD3 has nothing else
    notes = lines(check(PENDULUM, load_policies(zips / "ppo.zip", greedy=True)), "note")
    assert any(text.endswith("; load them without --greedy to share episodes") for text in notes)


def test_normalisers(zips, tmp_path):
    """One for all; one of two; each its own; and one that has never seen such observations."""
    first, second = copied(zips, tmp_path)
    assert load_policies(tmp_path).how == "stochastic"
    statistics(first, 0.0)
    (text,) = lines(check(CARTPOLE, load_policies(tmp_path)))
    assert text.startswith("cartpole_2_steps: no normaliser, while others have one; ")
    assert load_policies(tmp_path).how == "stochastic, observations normalised of 1 of 2"
    statistics(second, 0.0)
    assert load_policies(tmp_path).how == "stochastic, observations normalised"
    (text,) = lines(check(CARTPOLE, load_policies(tmp_path)))
    assert text.startswith("both policies: one normaliser's statistics for all, ")
    statistics(second, 0.1)
    assert lines(check(CARTPOLE, load_policies(tmp_path))) == []
    statistics(second, 7.0)
    (text,) = lines(check(CARTPOLE, load_policies(tmp_path)))
    assert text.startswith(
        "cartpole_2_steps: observations outside of what the normaliser has seen in up to 100% of the "
    )


def test_the_same_file_twice_is_one_warning(zips, tmp_path):
    copied(zips, tmp_path)
    (tmp_path / "copy.zip").write_bytes((zips / "cartpole_1_steps.zip").read_bytes())
    (text,) = lines(check(CARTPOLE, load_policies(tmp_path)))
    assert text == "copy: the same policy as cartpole_1_steps, byte by byte"


def test_observations_outside_of_the_files_bounds(zips):
    """Pendulum's numbers are within -1 to 1, -1 to 1 and -8 to 8: here they are five times larger."""
    scaled = GymnasiumEnvironment(
        lambda: gymnasium.wrappers.TransformObservation(
            gymnasium.make("Pendulum-v1"), lambda obs: 5 * obs, spaces.Box(-np.inf, np.inf, (3,))
        ),
        200,
        "scaled",
    )
    (text,) = lines(check(scaled, load_policies(zips / "ppo.zip")))
    assert text.startswith("ppo: observations outside of the bounds in the file (numbers [0, 1")


def command(*arguments, cwd="."):
    done = subprocess.run(
        [sys.executable, "-m", "manyfold.cli", "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


OWN = """
import gymnasium

class Broken(gymnasium.Wrapper):
    def step(self, action):
        raise OSError("no connection\\nto the robot")

def make():
    return Broken(gymnasium.make("CartPole-v1"))

def endless():
    env = gymnasium.make("CartPole-v1").unwrapped
    env.spec = None
    return env

def nothing():
    raise RuntimeError("no licence")
"""


def test_the_command(zips, tmp_path):
    """Exit code 0 where nothing is wrong, 1 where something is, 2 where the environment crashes; one line each."""
    code, out, errors = command("--env", "CartPole-v1", "--policies", zips / "cartpole*.zip")
    assert (code, errors, [text.split(":")[0] for text in out]) == (0, [], ["note", "ok"])
    code, out, errors = command("--env", "Acrobot-v1", "--policies", zips / "cartpole*.zip")
    assert (code, errors, [text.split(":")[0] for text in out]) == (1, [], ["error", "note"])
    (tmp_path / "own.py").write_text(OWN)
    code, out, errors = command("--env", "own:make", "--policies", zips / "cartpole*.zip", cwd=tmp_path)
    line = "step 1 of an episode failed inside of the environment (OSError: no connection to the robot)"
    assert (code, out, errors) == (2, [], [f"manyfold check: own:make: {line}, expected it to run"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--env", "NoSuch-v1"], "environment 'NoSuch-v1': Environment `NoSuch` doesn't exist"),
        (["--env", "no_such_module:make"], "environment 'no_such_module:make': No module named 'no_such_module'"),
        (
            ["--env", "own_environments:nothing"],
            "own_environments:nothing: making it failed .*RuntimeError: no licence",
        ),
        (["--env", "own_environments:endless"], "own_environments:endless has no TimeLimit, expected a horizon"),
        (["--env", "CartPole-v1", "--horizon", "0"], "horizon is 0, expected a whole number"),
        (["--env", "CartPole-v1", "--env-kwargs", "{"], "--env-kwargs is '{', expected JSON"),
        (["--env", "CartPole-v1", "--policies", "nothing*.zip"], "nothing\\*.zip: no files match, expected policies"),
        (["--env", "CartPole-v1", "--policies", "{both}"], "files of two environments: "),
        (["--env", "CartPole-v1", "--policies", "{cut}"], "cut.zip: not a readable zip .*was it cut off"),
        (["--env", "CartPole-v1", "--policies", "{other}"], "other.zip: a zip of readme.txt, expected a policy"),
    ],
)
def test_bad_input_of_the_command_is_one_line(arguments, line, zips, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "own_environments.py").write_text(OWN)
    whole = (zips / "ppo.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 10])
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    files = {"both": str(zips), "cut": "cut.zip", "other": "other.zip"}
    given = [
        argument.format(**files) if argument in ("{both}", "{cut}", "{other}") else argument for argument in arguments
    ]
    given += [] if "--policies" in given else ["--policies", str(zips / "cartpole*.zip")]
    assert main(["check", *given]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    (text,) = errors.splitlines()
    assert re.match(f"manyfold check: .*{line}", text)
