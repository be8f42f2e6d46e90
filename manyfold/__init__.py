"""manyfold: evaluate many policies with manyfold fewer episodes.

What is public (everything else may change without notice):

    Environment, Gridworld, BinnedMujoco, GymnasiumEnvironment, Finite    where episodes happen
    load_policies, PolicySet, TabularPolicySet, MlpPolicySet, ModulePolicySet, CallablePolicySet, JoinedPolicySet,
    ChosenPolicySet, ActorSet                                             K policies at once, with densities or without
    Spec, Gaussian, MultiCategorical                                      what a network's tensors and outputs mean
    Transitions, Writer, About, Episodes                                  logged tuples, whole episodes
    fit, FitConfig, ValueNets, q_problem, q_hat_problem, moment_reward, policy_weights
                                                                          fitted q and q_hat; r_hat; next weights pi
    Behavior, variance_problem, predict, forecast, recommend, cost, verdict, export
                                                                          mu and ODI, what they and others promise
    evaluate, collect, pool, combine, plan, first_states, Estimate        K policies from their own episodes in turns
    sample, decide, winner, until, play, Sample, Decision, Stopped, Returns, Played; modules intervals and exports
                                                                          who is best, how sure that is, when to stop
    ESTIMATORS, METHODS, RETURNS, rollout_tabular, in_turns, pooled_truth online episodes and what they say
    FiniteMDP; the modules exact, similarity, estimators, diagnostics and rollout
                                                                          exact dynamic programming, Theorems 3 and 4,
                                                                          the returns, whether to trust them, episodes

Names are imported at first use: `import manyfold` alone loads neither torch nor MuJoCo.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_PUBLIC = {
    "About": "data.transitions",
    "Behavior": "design.behavior",
    "BinnedMujoco": "envs.binned_mujoco",
    "CallablePolicySet": "policies",
    "ActorSet": "policies.actors",
    "ESTIMATORS": "estimate.registry",
    "Estimate": "estimate.evaluation",
    "Environment": "envs.base",
    "Episodes": "data.episodes",
    "Finite": "envs.base",
    "FiniteMDP": "mdp",
    "Gaussian": "policies.heads",
    "Gridworld": "envs.gridworld",
    "GymnasiumEnvironment": "envs.gymnasium",
    "ChosenPolicySet": "policies",
    "Decision": "estimate.ranking",
    "JoinedPolicySet": "policies",
    "MlpPolicySet": "policies",
    "ModulePolicySet": "policies",
    "MultiCategorical": "policies.heads",
    "PolicySet": "policies",
    "METHODS": "estimate.methods",
    "RETURNS": "estimate.methods",
    "Returns": "estimate.stopping",
    "Played": "estimate.stopping",
    "Sample": "estimate.intervals",
    "Spec": "policies.mlp",
    "Stopped": "estimate.stopping",
    "TabularPolicySet": "policies",
    "Transitions": "data.transitions",
    "ValueNets": "fqe.nets",
    "Writer": "data.transitions",
    "collect": "estimate.collecting",
    "combine": "estimate.evaluation",
    "decide": "estimate.ranking",
    "evaluate": "door",
    "cost": "design.prediction",
    "export": "design.export",
    "first_states": "estimate.collecting",
    "fit": "fqe.engine",
    "forecast": "design.prediction",
    "in_turns": "rollout",
    "load_policies": "policies.loading",
    "moment_reward": "fqe.problems",
    "plan": "estimate.shares",
    "play": "estimate.stopping",
    "policy_weights": "fqe.problems",
    "pool": "estimate.evaluation",
    "pooled_truth": "estimate.runs",
    "predict": "design.prediction",
    "q_hat_problem": "fqe.problems",
    "q_problem": "fqe.problems",
    "recommend": "design.prediction",
    "rollout_tabular": "rollout",
    "sample": "estimate.intervals",
    "until": "estimate.stopping",
    "variance_problem": "design.prediction",
    "verdict": "design.prediction",
    "winner": "estimate.ranking",
}
_RENAMED = {"FitConfig": ("fqe.engine", "Config")}
_MODULES = {name: f"estimate.{name}" for name in ("diagnostics", "estimators", "exports", "intervals")}

__all__ = ["__version__", "exact", "rollout", "similarity", *_MODULES, *_PUBLIC, *_RENAMED]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"manyfold.{_PUBLIC[name]}"), name)
    if name in _RENAMED:
        module, original = _RENAMED[name]
        return getattr(importlib.import_module(f"manyfold.{module}"), original)
    if name in ("exact", "rollout", "similarity", *_MODULES):
        return importlib.import_module(f"manyfold.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'manyfold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register() -> None:
    """The Gridworld as a Gymnasium environment: gymnasium.make("manyfold/Gridworld-v0", m=10)."""
    import gymnasium

    gymnasium.register("manyfold/Gridworld-v0", entry_point="manyfold.envs.gridworld:GridworldEnv")


_register()
