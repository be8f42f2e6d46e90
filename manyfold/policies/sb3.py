"""Policies of Stable-Baselines3's zips: without the library, and without running the pickles that lie in them.

A zip holds `data` (JSON; what is no JSON is a base64 pickle with readable text beside it, and only the text is read)
and `policy.pth` (weights, read by `weights_only`). The layers follow from the weights' shapes; the activation, the
spaces and epsilon from the text.
"""

import json
import math
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyfold.arrays import check_number
from manyfold.policies.heads import Gaussian, MultiCategorical
from manyfold.policies.imported import NO_DENSITY_NOTE, Imported, Options, parts
from manyfold.policies.layers import (
    ACTIVATIONS,
    WIDEST,
    EpsilonGreedy,
    FixedStd,
    Image,
    LearnedStd,
    Normaliser,
    StateDependentNoise,
    Statistics,
    Switches,
    conv,
    linear,
)
from manyfold.policies.weights import read_numbers, read_part, read_tensors, state_dict

LOG_STD = (-20.0, 2.0)  # SAC's clamp
SDE_NOTE = (
    "gSDE: noise is drawn afresh at every step, with its marginal density; in training one exploration matrix lasted "
    "for many steps"
)
# Which algorithm wrote the data: by a field that only it has, the first that fits.
ALGORITHMS = {
    "exploration_rate": "DQN",
    "target_entropy": "SAC",
    "policy_delay": "TD3",
    "cg_max_steps": "TRPO",
    "clip_range": "PPO",
    "gae_lambda": "A2C",
}


class Space(NamedTuple):
    """An observation or action space, as its text tells."""

    kind: str  # "box", "discrete", "multi_discrete", "multi_binary"
    shape: tuple[int, ...]
    low: tuple[float, ...]  # flattened; empty where unknown
    high: tuple[float, ...]
    nvec: tuple[int, ...]
    dtype: str

    @property
    def width(self) -> int:
        """Numbers of a flattened observation; an index is one-hot."""
        return sum(self.nvec) if self.nvec else math.prod(self.shape)

    @property
    def image(self) -> bool:
        """What Stable-Baselines3 divides by 255; bounds that its text leaves out count as an image's."""
        bounds = all(x == 0 for x in self.low) and all(x == 255 for x in self.high)
        return self.kind == "box" and len(self.shape) == 3 and self.dtype == "uint8" and bounds


def is_sb3(archive: zipfile.ZipFile) -> bool:
    """Whether a zip is one of Stable-Baselines3's."""
    return {"data", "policy.pth"} <= set(archive.namelist())


def read_sb3(path: Path, archive: zipfile.ZipFile, options: Options, statistics: Statistics | None) -> Imported:
    """One policy from a zip; what cannot be known from text and weights alone is refused with one line."""
    data = _data(path, archive)
    weights = state_dict(path, read_tensors(path, read_part(path, archive, "policy.pth")))
    algorithm = next((name for field, name in ALGORITHMS.items() if field in data), "policy")
    if any(name.startswith(("lstm_actor.", "lstm_critic.")) for name in weights):
        raise ValueError(
            f"{path}: a recurrent policy, expected one that sees the observation only; its actions depend on a hidden "
            "state, so ratios of other policies' episodes cannot be formed; evaluate it by its own episodes"
        )
    _check_origin(path, data, weights)
    kwargs = data.get("policy_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"{path}: policy_kwargs are {kwargs!r:.40}, expected a mapping")
    observations, actions = (_space(path, data, name) for name in ("observation_space", "action_space"))
    builder = _Builder(path, algorithm, weights, kwargs, observations, options, statistics)
    notes: list[str] = []
    if algorithm == "DQN":
        made = _dqn(builder, data, actions, options, notes)
    elif algorithm in ("SAC", "TD3"):
        made = _off_policy(builder, algorithm, data, kwargs, actions, options, notes)
    else:
        made = _on_policy(builder, data, kwargs, actions, options, notes)
    if data.get("use_sde"):
        notes.append(SDE_NOTE)
    if observations.kind in ("discrete", "multi_discrete"):
        notes.append(f"an observation is an index: give it one-hot, {observations.width} numbers")
    return Imported(
        name=path.stem,
        path=path,
        kind=f"sb3 {algorithm}",
        width=observations.width,
        obs_low=observations.low or None,
        obs_high=observations.high or None,
        notes=tuple(notes),
        **made,
    )


def _on_policy(
    build: "_Builder", data: dict[str, Any], kwargs: dict[str, Any], actions: Space, options: Options, notes: list[str]
) -> dict[str, Any]:
    """PPO and A2C: shared layers (before version 1.8), the policy's layers, and the head by the action space."""
    prefix = "pi_features_extractor" if "pi_features_extractor.cnn.0.weight" in build.weights else "features_extractor"
    body = build.body(prefix, ("mlp_extractor.shared_net", "mlp_extractor.policy_net"), "tanh")
    final = build.linear("action_net")
    if actions.kind == "box":
        low, high = build.bounds(actions, final.out_features)
        log_std = build.tensor("log_std")
        squashed = bool(kwargs.get("squash_output", False))
        head = Gaussian(low, high, squashed)
        if data.get("use_sde"):
            noise = StateDependentNoise(body, final, log_std, bool(kwargs.get("use_expln", False)))
            return parts(noise, head, options.greedy)
        return parts(FixedStd(nn.Sequential(body, final), log_std), head, options.greedy)
    if actions.kind == "multi_binary":
        notes.append(f"MultiBinary({final.out_features}) as that many pairs off/on")
        switches = MultiCategorical((2,) * final.out_features)
        return parts(nn.Sequential(body, final, Switches()), switches, options.greedy)
    build.expect_outputs(final, sum(actions.nvec), actions)
    choices = actions.nvec[0] if actions.kind == "discrete" else MultiCategorical(actions.nvec)
    return parts(nn.Sequential(body, final), choices, options.greedy)


def _off_policy(
    build: "_Builder",
    algorithm: str,
    data: dict[str, Any],
    kwargs: dict[str, Any],
    actions: Space,
    options: Options,
    notes: list[str],
) -> dict[str, Any]:
    """SAC: a Gaussian before tanh; TD3 and DDPG: tanh of a network, hence actions without a density."""
    features = "actor.features_extractor"
    if algorithm == "TD3":
        module = build.body(features, ("actor.mu",), "relu", last=True)
        low, high = build.bounds(actions, build.outputs)
        notes.append(NO_DENSITY_NOTE)
        return parts(FixedStd(module, torch.zeros(build.outputs)), Gaussian(low, high, True), True)
    body = build.body(features, ("actor.latent_pi",), "relu")
    if data.get("use_sde"):
        clipped = "actor.mu.0.weight" in build.weights
        mean: nn.Module = build.linear("actor.mu.0" if clipped else "actor.mu")
        low, high = build.bounds(actions, mean.out_features)  # type: ignore[arg-type]
        if clipped:
            limit = kwargs.get("clip_mean", 2.0)
            check_number(f"{build.path}: clip_mean", limit, 0, whole=False)
            mean = nn.Sequential(mean, nn.Hardtanh(-limit, limit))
        noise = StateDependentNoise(body, mean, build.tensor("actor.log_std"), bool(kwargs.get("use_expln", False)))
        return parts(noise, Gaussian(low, high, True), options.greedy)
    final = build.linear("actor.mu")
    low, high = build.bounds(actions, final.out_features)
    gaussian = LearnedStd(body, final, build.linear("actor.log_std"), *LOG_STD, squeezed=False)
    return parts(gaussian, Gaussian(low, high, True), options.greedy)


def _dqn(build: "_Builder", data: dict[str, Any], actions: Space, options: Options, notes: list[str]) -> dict[str, Any]:
    """Epsilon-greedy on the online network's values."""
    values = build.body("q_net.features_extractor", ("q_net.q_net",), "relu", last=True)
    if actions.kind != "discrete" or build.outputs != actions.nvec[0]:
        raise ValueError(f"{build.path}: {build.outputs} values, expected one for each action of a Discrete space")
    epsilon = data["exploration_rate"] if options.epsilon is None else options.epsilon
    check_number(f"{build.path}: epsilon", epsilon, 0, 1, whole=False)
    if options.greedy:
        epsilon = 0.0
    said = "as the file says" if options.epsilon is None and not options.greedy else "as you said"
    notes.append(f"epsilon {epsilon:g}, {said}; Stable-Baselines3's evaluate_policy would take 0")
    return {"module": EpsilonGreedy(values, epsilon).eval(), "actions": build.outputs, "greedy": epsilon == 0}


class _Builder:
    """Layers from weights by name, with the observation's preprocessing in front."""

    def __init__(
        self,
        path: Path,
        algorithm: str,
        weights: dict[str, Tensor],
        kwargs: dict[str, Any],
        observations: Space,
        options: Options,
        statistics: Statistics | None,
    ) -> None:
        self.path, self.algorithm, self.weights, self.kwargs = path, algorithm, weights, kwargs
        self.observations, self.options, self.statistics = observations, options, statistics
        self.outputs = 0

    def tensor(self, name: str) -> Tensor:
        """One tensor, which must be there."""
        if name not in self.weights:
            raise ValueError(f"{self.path}: no {name} among the weights, expected those of a plain {self.algorithm}")
        return self.weights[name]

    def linear(self, name: str) -> nn.Linear:
        """A linear layer."""
        return linear(self.path, self.weights, name)

    def bounds(self, actions: Space, outputs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of a continuous action space, which must have as many dimensions as the network has outputs."""
        if actions.kind != "box" or not len(actions.low) == len(actions.high) == outputs:
            raise ValueError(
                f"{self.path}: {outputs} means and bounds of {len(actions.low)} actions ({actions.kind}), expected a "
                "Box whose bounds can be read from the file's text"
            )
        return actions.low, actions.high

    def expect_outputs(self, final: nn.Linear, expected: int, actions: Space) -> None:
        """Refuses another number of logits than the action space has actions."""
        if final.out_features != expected or not expected:
            raise ValueError(f"{self.path}: {final.out_features} logits, expected {expected} for {actions.kind}")

    def body(self, features: str, prefixes: Sequence[str], default: str, last: bool = False) -> nn.Sequential:
        """Normaliser, image if there is one, and the layers under the prefixes, each followed by the activation.

        Args:
            last: the last layer is the output, without an activation.
        """
        layers = self._features(features)
        width = self.outputs or self.observations.width
        made: list[nn.Linear] = []
        for prefix in prefixes:
            numbers = sorted(int(m[1]) for k in self.weights if (m := re.fullmatch(rf"{prefix}\.(\d+)\.weight", k)))
            if numbers != list(range(0, 2 * len(numbers), 2)):
                raise ValueError(
                    f"{self.path}: {prefix} has layers {numbers}, expected linear ones with activations between them"
                )
            made += [self.linear(f"{prefix}.{number}") for number in numbers]
        activation = self._activation(default) if made[: len(made) - last] else nn.Identity
        for i, layer in enumerate(made):
            if layer.in_features != width:
                raise ValueError(
                    f"{self.path}: a layer of {layer.in_features} inputs after {width} outputs, expected them equal; "
                    "has it a features extractor of its own?"
                )
            layers += [layer] if last and i == len(made) - 1 else [layer, activation()]
            width = layer.out_features
        self.outputs = width
        return nn.Sequential(Normaliser(self.observations.width, self.statistics), *layers)

    def _features(self, prefix: str) -> list[nn.Module]:
        """Flat observations, or NatureCNN's features of images."""
        space, shape = self.observations, self.observations.shape
        scaled = space.image and bool(self.kwargs.get("normalize_images", True))
        convolved = f"{prefix}.cnn.0.weight" in self.weights
        if not space.image and not convolved:
            return []
        if len(shape) != 3:
            raise ValueError(f"{self.path}: a CNN on observations {list(shape)}, expected images of three axes")
        layers: list[nn.Module] = [Image(shape, scaled)]
        if not convolved:
            return [*layers, nn.Flatten()]
        for number, stride in ((0, 4), (2, 2), (4, 1)):
            layers += [conv(self.path, self.weights, f"{prefix}.cnn.{number}", stride), nn.ReLU()]
        final = self.linear(f"{prefix}.linear.0")
        self.outputs = final.out_features
        return [*layers, nn.Flatten(), final, nn.ReLU()]

    def _activation(self, default: str) -> type[nn.Module]:
        said = self.kwargs.get("activation_fn")
        if self.options.activation is not None:
            name = self.options.activation.lower()
        elif said is None:
            return ACTIVATIONS[default]
        else:
            found = re.fullmatch(r"<class 'torch\.nn\.modules\.activation\.(\w+)'>", str(said))
            name = found[1].lower() if found else ""
        if name not in ACTIVATIONS:
            raise ValueError(
                f"{self.path}: activation {self.options.activation or said!r:.60} cannot be known without running its "
                f"pickle, expected one of {', '.join(ACTIVATIONS)}; say activation="
            )
        return ACTIVATIONS[name]


def _data(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        data = json.loads(read_part(path, archive, "data"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its data is no JSON ({error!s:.60}), expected a zip of Stable-Baselines3") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: its data is {type(data).__name__}, expected the fields of Stable-Baselines3")
    return data


def _check_origin(path: Path, data: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Refuses policies of other classes: the same weights may mean another function there."""
    said = data.get("policy_class")
    module = said.get("__module__") if isinstance(said, dict) else None
    if isinstance(module, str) and not module.startswith("stable_baselines3."):
        why = "its actions depend on masks" if "maskable" in module else "what it computes is not in the file"
        raise ValueError(
            f"{path}: a policy class of {module}, expected Stable-Baselines3's own; {why}: export it by "
            "torch.export or ONNX, or pass a torch module"
        )
    own = data.get("policy_kwargs") if isinstance(data.get("policy_kwargs"), dict) else {}
    extractor = (own or {}).get("features_extractor_class")
    if extractor is not None and not re.search(r"stable_baselines3.*\.(FlattenExtractor|NatureCNN)'", str(extractor)):
        raise ValueError(f"{path}: features extractor {extractor!s:.80}, expected FlattenExtractor or NatureCNN")
    known = (
        r"((pi_|vf_)?features_extractor\.(cnn|linear)\.|mlp_extractor\.(shared|policy|value)_net\.|action_net\.|"
        r"value_net\.|log_std$|q_net(_target)?\.(q_net|features_extractor\.(cnn|linear))\.|critic(_target)?\.|"
        r"actor(_target)?\.(latent_pi|mu|log_std|features_extractor\.(cnn|linear))(\.|$))"
    )
    if strange := [name for name in weights if not re.match(known, name)]:
        raise ValueError(
            f"{path}: weights {strange[0]!r:.60}, expected those of Stable-Baselines3's MlpPolicy or CnnPolicy, which "
            "can be rebuilt from them; export it by torch.export or ONNX, or pass a torch module"
        )


def _space(path: Path, data: dict[str, Any], name: str) -> Space:
    """A space from the text beside its pickle."""
    said = data.get(name)
    found = re.search(r"spaces\.(\w+)\.", str(said.get(":type:"))) if isinstance(said, dict) else None
    kind = found[1] if found else "nothing"
    if not isinstance(said, dict) or kind not in ("box", "discrete", "multi_discrete", "multi_binary"):
        raise ValueError(f"{path}: {name} is {kind}, expected Box, Discrete, MultiDiscrete or MultiBinary")
    shape = tuple(int(x) for x in read_numbers(said.get("_shape", said.get("shape"))))
    nvec = tuple(int(x) for x in read_numbers(said.get({"discrete": "n", "multi_discrete": "nvec"}.get(kind, ""))))
    if len(nvec) != {"discrete": 1, "multi_discrete": math.prod(shape)}.get(kind, 0) or any(n < 1 for n in nvec):
        raise ValueError(f"{path}: {name} has {len(nvec)} numbers of actions, expected them in the file's text")
    low, high = (tuple(read_numbers(said.get(side)).tolist()) for side in ("low", "high"))
    if not len(low) == len(high) == math.prod(shape):
        low = high = ()
    if math.prod(shape) > WIDEST or sum(nvec) > WIDEST:
        raise ValueError(
            f"{path}: {name} has {max(math.prod(shape), sum(nvec)):,} numbers, expected at most {WIDEST:,}"
        )
    return Space(kind, shape, low if kind == "box" else (), high if kind == "box" else (), nvec, str(said.get("dtype")))
