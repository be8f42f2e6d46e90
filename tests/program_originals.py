"""Policies as programs: ONNX, torch.export and TorchScript, by the tools that write them, from networks of torch."""

import warnings
from functools import partial

import numpy as np
import onnxruntime
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Normal

from manyfold.policies.heads import Gaussian, MultiCategorical
from tests.originals import BOX, VECTOR, Original, World, normal_log_probs, observations, spread

D = BOX.shape[0]
BOUNDS = tuple(BOX.low.tolist()), tuple(BOX.high.tolist())
SEVERAL = spaces.MultiDiscrete([2, 3])


class Network(nn.Module):
    """Gives what `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(VECTOR.shape[0], 16), nn.Tanh(), nn.Linear(16, 2 * D))
        self.std = nn.Parameter(torch.linspace(-1, 0.5, D))
        self.form = form

    def forward(self, obs: torch.Tensor):
        out = self.body(obs)
        if self.form == "logits":
            return out
        if self.form == "several":
            return out[:, :5]
        if self.form == "probabilities":
            return torch.softmax(out, -1)
        if self.form == "several probabilities":
            return torch.cat([torch.softmax(out[:, :2], -1), torch.softmax(out[:, 2:5], -1)], -1)
        mean, log_std = out[:, :3], torch.tanh(out[:, 3:])
        if self.form == "mean beside log_std":
            return torch.cat([mean, log_std], -1)
        if self.form == "mean, log_std":
            return mean, log_std
        if self.form == "mean, log_std of no observation":
            return mean, self.std
        return mean, log_std.exp()


class Named(nn.Module):
    """Two outputs by name."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, std = self.network(obs)
        return {"mean": mean, "std": std}


def to_onnx(network, path, names, batch=None, width=VECTOR.shape[0]):
    dynamic = {"obs": {0: torch.export.Dim("n")}} if batch is None else None
    example = (torch.zeros(batch or 2, width),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter uses what torch deprecates
        torch.onnx.export(
            network, example, path, input_names=["obs"], output_names=names, dynamic_shapes=dynamic, verbose=False
        )


def to_export(network, path, names, batch=None):
    dynamic = {"obs": {0: torch.export.Dim("n")}} if batch is None else None
    example = (torch.zeros(batch or 2, VECTOR.shape[0]),)
    torch.export.save(torch.export.export(network, example, dynamic_shapes=dynamic), path)


def to_script(network, path, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, its files are still around
        torch.jit.trace(network, torch.zeros(2, VECTOR.shape[0]), strict=False).save(str(path))


def by_onnx(path, obs, batch):
    """What onnxruntime gives: it rounds otherwise than torch, and multiplied by 1 / std that is more than 1e-6."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    size = batch or len(obs)
    pieces = [session.run(None, {"obs": obs[i : i + size]}) for i in range(0, len(obs) // size * size, size)]
    found = [torch.from_numpy(np.concatenate(column) if batch else column[0]) for column in zip(*pieces, strict=True)]
    return found[0] if len(found) == 1 else found


FORMATS = {
    "ONNX": (to_onnx, "policy.onnx", {}),
    "torch.export": (to_export, "policy.pt2", {"trust": True}),
    "TorchScript": (to_script, "policy.pt", {"trust": True}),
}
FORMS = ("logits", "probabilities", "several", "several probabilities", "mean, log_std", "mean, std")
CASES = {f"{kind}, {form}": (kind, form, None) for kind in FORMATS for form in FORMS}
CASES |= {
    "ONNX, mean, log_std of no observation": ("ONNX", "mean, log_std of no observation", None),
    "ONNX, mean beside log_std": ("ONNX", "mean beside log_std", None),
    "ONNX, logits, batches of 7": ("ONNX", "logits", 7),
    "torch.export, mean, log_std, batches of 7": ("torch.export", "mean, log_std", 7),
}


@torch.no_grad()
def make(name, folder, n=1000):
    """The program of that name in the folder, and what it says at n observations where its own runtime runs it."""
    kind, form, batch = CASES[name]
    n -= n % (batch or 1)
    write, file, options = FORMATS[kind]
    torch.manual_seed(0)
    network, path, obs = spread(Network(form)).eval(), folder / file, observations(VECTOR, n)
    names = (
        form.split(", ")
        if form in ("mean, log_std", "mean, std")
        else ["mean", "log_std"]
        if "mean, " in form
        else ["out"]
    )
    named = Named(network) if form == "mean, std" and kind != "ONNX" else network
    (partial(write, batch=batch) if batch else write)(named, path, names)
    out = by_onnx(path, obs, batch) if kind == "ONNX" else network(torch.as_tensor(obs))

    def original(actions, *said, head=None):
        return Original(path, lambda: World(VECTOR, actions), obs, *said, options={**options, "head": head})

    if form == "logits":
        return original(spaces.Discrete(2 * D), Categorical(logits=out).probs.numpy())
    if form == "probabilities":
        return original(spaces.Discrete(2 * D), out.numpy())
    if form.startswith("several"):
        kinds = {"several": "logits", "several probabilities": "probs"}
        choices = [Categorical(**{kinds[form]: part.double()}) for part in out.split([2, 3], -1)]
        actions = torch.stack([choice.sample() for choice in choices], -1)
        log_probs = sum(choice.log_prob(a) for choice, a in zip(choices, actions.T, strict=True))
        found = actions.numpy()
        return original(SEVERAL, log_probs.numpy(), found, found, head=MultiCategorical((2, 3)))
    mean, second = out.split(D, -1) if form == "mean beside log_std" else out
    distribution = Normal(mean.double(), second.double() if form == "mean, std" else second.double().exp())
    actions = distribution.sample()
    head = Gaussian(*BOUNDS) if form == "mean beside log_std" else None
    sent = np.clip(actions.numpy(), BOX.low, BOX.high)
    return original(BOX, normal_log_probs(distribution, actions), actions.numpy(), sent, head=head)
