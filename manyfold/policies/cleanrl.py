"""Policies of CleanRL's scripts: `torch.save`d state dicts, recognised by their names and shapes.

The scripts fix what a state dict doesn't say: Tanh in PPO, ReLU in DQN, SAC, TD3 and DDPG and in convolutions, images
divided by 255, SAC's log_std squeezed into -5..2. Some save a tuple of state dicts (TD3: actor, critics) or put the
weights beside their arguments.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyfold.arrays import check_number
from manyfold.policies.heads import Gaussian
from manyfold.policies.imported import (
    NO_DENSITY_NOTE,
    Actions,
    Imported,
    Options,
    described,
    parts,
    size,
    unbounded,
)
from manyfold.policies.layers import (
    ACTIVATIONS,
    WIDEST,
    EpsilonGreedy,
    FixedStd,
    Image,
    LearnedStd,
    Normaliser,
    Statistics,
    conv,
    linear,
)
from manyfold.policies.weights import state_dict

LOG_STD = (-5.0, 2.0)  # of sac_continuous_action.py
EPSILON = 0.05  # end_e of dqn.py, and of its evaluation
KNOWN = {  # the weights of each script's networks; one more may change what the others mean (an LSTM, a noisy layer)
    "ppo": r"(actor|critic|network)\.",
    "ppo_continuous": r"(actor_mean|critic)\.|actor_logstd$",
    "dqn": r"network\.",
    "sac": r"(fc1|fc2|fc_mean|fc_logstd)\.|action_(scale|bias)$",
    "td3": r"(fc1|fc2|fc_mu)\.|action_(scale|bias)$",
}
SIDE = 84  # pixels of an Atari frame
BOUNDS_NOTE = "the file has no action bounds: the environment's are used to clip, as CleanRL's ClipAction does"
UNNORMALISED_NOTE = (
    "no normaliser beside it: ppo_continuous_action.py trains under NormalizeObservation, whose statistics it doesn't "
    "save; put them into {stem}.normalizer.npz (mean, var, clip 10, epsilon 1e-8)"
)


def read_cleanrl(path: Path, content: Any, options: Options, statistics: Statistics | None) -> Imported:
    """One policy from what `torch.save` wrote (`content`); a state dict of no known script is refused."""
    found = [weights for weights in _dictionaries(content) if _kind(weights)]
    if len(found) != 1:
        names = ", ".join(next(_dictionaries(content), {})) or type(content).__name__
        raise ValueError(
            f"{path}: {len(found)} known networks, found {names:.80}; expected CleanRL's names (actor.0.weight, "
            "actor_mean.0.weight, network.0.weight, fc1.weight): pass a torch module, or export it by ONNX"
        )
    weights = state_dict(path, found[0])
    kind = _kind(weights)
    if strange := [name for name in weights if not re.match(KNOWN[kind], name)]:
        raise ValueError(
            f"{path}: {strange[0]!r:.60} belongs to no network of CleanRL's {kind} scripts, so what it computes is "
            "not in the file; pass a torch module, or export it by ONNX"
        )
    build = {"ppo": _ppo, "ppo_continuous": _ppo_continuous, "dqn": _dqn, "sac": _sac, "td3": _td3}[kind]
    notes: list[str] = []
    body, width = _input(path, weights, options, statistics, kind)
    made = build(path, weights, body, options, notes)
    if kind == "ppo_continuous" and statistics is None:
        notes.append(UNNORMALISED_NOTE.format(stem=path.stem))
    return Imported(path.stem, path, f"cleanrl {kind}", width=width, notes=tuple(notes), **made)


def _dictionaries(content: Any, levels: int = 2) -> Iterator[Mapping[str, Tensor]]:
    """State dicts in what was saved: itself, in a tuple, or under a name beside other things."""
    inside = content.values() if isinstance(content, Mapping) else content if isinstance(content, tuple | list) else ()
    if isinstance(content, Mapping) and content and all(isinstance(x, Tensor) for x in content.values()):
        yield content
    elif levels:
        for part in inside:
            yield from _dictionaries(part, levels - 1)


def _kind(weights: Mapping[str, Tensor]) -> str:
    """Which of CleanRL's scripts saved it; nothing if none."""
    names = {str(name) for name in weights}
    if {"fc_mean.weight", "fc_logstd.weight", "fc1.weight"} <= names:
        return "sac"
    if {"fc_mu.weight", "fc1.weight"} <= names:
        return "td3"
    if {"actor_mean.0.weight", "actor_logstd"} <= names:
        return "ppo_continuous"
    if "actor.0.weight" in names or {"actor.weight", "network.0.weight"} <= names:
        return "ppo"
    return "dqn" if "network.0.weight" in names else ""


def _numbers(weights: Mapping[str, Tensor], prefix: str) -> list[int]:
    return sorted(int(m[1]) for name in weights if (m := re.fullmatch(rf"{prefix}\.(\d+)\.weight", name)))


def _activation(path: Path, options: Options, default: str) -> type[nn.Module]:
    name = (options.activation or default).lower()
    if name not in ACTIVATIONS:
        raise ValueError(f"{path}: activation {name!r:.40}, expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _input(
    path: Path, weights: dict[str, Tensor], options: Options, statistics: Statistics | None, kind: str
) -> tuple[list[nn.Module], int]:
    """Normaliser and convolutions, and the observation's width."""
    first = {"sac": "fc1", "td3": "fc1", "ppo_continuous": "actor_mean.0"}.get(kind)
    if first is None:
        first = "actor.0" if "network.0.weight" not in weights else "network.0"
    weight = weights[f"{first}.weight"]
    if weight.ndim != 4:
        width = linear(path, weights, first).in_features
        if width > WIDEST:
            raise ValueError(f"{path}: {width:,} inputs, expected at most {WIDEST:,}")
        return [Normaliser(width, statistics)], width
    shape = (weight.shape[1], SIDE, SIDE)  # four frames of 84 x 84: after the convolutions 64 x 7 x 7
    if (flat := linear(path, weights, "network.7").in_features) != 64 * 7 * 7:
        raise ValueError(f"{path}: {flat} numbers after the convolutions, expected {64 * 7 * 7} of 84 x 84 images")
    layers: list[nn.Module] = [Normaliser(int(np.prod(shape)), statistics), Image(shape, scaled=True)]
    for number, stride in ((0, 4), (2, 2), (4, 1)):
        layers += [conv(path, weights, f"network.{number}", stride), nn.ReLU()]
    return [*layers, nn.Flatten()], int(np.prod(shape))


def _mlp(
    path: Path, weights: dict[str, Tensor], prefix: str, activation: type[nn.Module], last: bool
) -> list[nn.Module]:
    """The linear layers under a prefix with activations between them; the last one has none if it is the output."""
    numbers = _numbers(weights, prefix)
    if weights[f"{prefix}.{numbers[0]}.weight"].ndim == 4:
        numbers = [number for number in numbers if number >= 7]  # behind the convolutions
    if numbers != list(range(numbers[0], numbers[0] + 2 * len(numbers), 2)):
        raise ValueError(f"{path}: {prefix} has layers {numbers}, expected linear ones with activations between them")
    layers: list[nn.Module] = []
    for i, number in enumerate(numbers):
        layer = linear(path, weights, f"{prefix}.{number}")
        layers += [layer] if last and i == len(numbers) - 1 else [layer, activation()]
    return layers


def _choices(path: Path, outputs: int, options: Options) -> Actions:
    """Of so many logits: one choice unless the caller says how they are divided."""
    actions = options.head or outputs
    if isinstance(actions, Gaussian) or size(actions) != outputs:
        raise ValueError(f"{path}: {outputs} logits, expected those of {described(actions)}")
    return actions


def _ppo(
    path: Path, weights: dict[str, Tensor], body: list[nn.Module], options: Options, notes: list[str]
) -> dict[str, Any]:
    """ppo.py: `actor`; ppo_atari.py and others: `network`, then one layer `actor`."""
    if "actor.weight" in weights:
        images = weights["network.0.weight"].ndim == 4
        activation = _activation(path, options, "relu" if images else "tanh")
        if not images and options.activation is None:
            notes.append("tanh between its layers, as in ppo.py; say activation= if it had another")
        layers = [*_mlp(path, weights, "network", activation, False), linear(path, weights, "actor")]
    else:
        layers = _mlp(path, weights, "actor", _activation(path, options, "tanh"), True)
    return parts(nn.Sequential(*body, *layers), _choices(path, _outputs(layers), options), options.greedy)


def _outputs(layers: list[nn.Module]) -> int:
    """Outputs of the last layer."""
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    return last.out_features


def _ppo_continuous(
    path: Path, weights: dict[str, Tensor], body: list[nn.Module], options: Options, notes: list[str]
) -> dict[str, Any]:
    layers = _mlp(path, weights, "actor_mean", _activation(path, options, "tanh"), True)
    outputs, log_std = _outputs(layers), weights["actor_logstd"]
    if log_std.numel() != outputs:
        raise ValueError(f"{path}: {outputs} means and {log_std.numel()} deviations, expected as many")
    head = options.head or unbounded(outputs)
    if not isinstance(head, Gaussian) or len(head.low) != outputs:
        raise ValueError(f"{path}: {outputs} means, expected those of {described(head)}")
    if options.head is None:
        notes.append(BOUNDS_NOTE)
    return parts(FixedStd(nn.Sequential(*body, *layers), log_std), head, options.greedy)


def _dqn(
    path: Path, weights: dict[str, Tensor], body: list[nn.Module], options: Options, notes: list[str]
) -> dict[str, Any]:
    layers = _mlp(path, weights, "network", _activation(path, options, "relu"), True)
    epsilon = 0.0 if options.greedy else EPSILON if options.epsilon is None else options.epsilon
    check_number("epsilon", epsilon, 0, 1, whole=False)
    if options.epsilon is None and not options.greedy:
        notes.append(f"epsilon {epsilon:g}, as dqn.py ends with and evaluates by: the file doesn't say; say epsilon=")
    module = EpsilonGreedy(nn.Sequential(*body, *layers), epsilon)
    return {"module": module.eval(), "actions": _outputs(layers), "greedy": epsilon == 0}


def _bounds(path: Path, weights: dict[str, Tensor], outputs: int) -> Gaussian:
    """From the buffers action_scale and action_bias: the environment gets tanh(action) * scale + bias."""
    if not {"action_scale", "action_bias"} <= weights.keys():
        raise ValueError(f"{path}: no action_scale and action_bias, expected CleanRL's buffers")
    scale, bias = (weights[name].double().flatten() for name in ("action_scale", "action_bias"))
    if not len(scale) == len(bias) == outputs:
        raise ValueError(f"{path}: bounds of {len(scale)} actions, expected {outputs}")
    return Gaussian(tuple((bias - scale).tolist()), tuple((bias + scale).tolist()), squashed=True)


def _two_layers(path: Path, weights: dict[str, Tensor], options: Options) -> list[nn.Module]:
    activation = _activation(path, options, "relu")
    return [linear(path, weights, "fc1"), activation(), linear(path, weights, "fc2"), activation()]


def _sac(
    path: Path, weights: dict[str, Tensor], body: list[nn.Module], options: Options, notes: list[str]
) -> dict[str, Any]:
    mean, log_std = linear(path, weights, "fc_mean"), linear(path, weights, "fc_logstd")
    latent = nn.Sequential(*body, *_two_layers(path, weights, options))
    head = _bounds(path, weights, mean.out_features)
    return parts(LearnedStd(latent, mean, log_std, *LOG_STD, squeezed=True), head, options.greedy)


def _td3(
    path: Path, weights: dict[str, Tensor], body: list[nn.Module], options: Options, notes: list[str]
) -> dict[str, Any]:
    final = linear(path, weights, "fc_mu")
    notes.append(NO_DENSITY_NOTE)
    mean = nn.Sequential(*body, *_two_layers(path, weights, options), final)
    return parts(FixedStd(mean, torch.zeros(final.out_features)), _bounds(path, weights, final.out_features), True)
