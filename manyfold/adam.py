"""Adam on one flat tensor, by torch's functional form: the class imports torch's compiler, 2 s in every process."""

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """`step(rate)` moves `flat` along `gradient`, both in place; `state` is all that changes on the way."""

    def __init__(self, flat: Tensor, gradient: Tensor, eps: float = 1e-8) -> None:
        self.flat, self.gradient, self.eps = flat, gradient, eps
        moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
        self.state = {"step": torch.tensor(0.0), **moments}

    def step(self, rate: float) -> None:
        step, mean, square = ([self.state[name]] for name in ("step", "exp_avg", "exp_avg_sq"))
        adam(
            [self.flat],
            [self.gradient],
            mean,
            square,
            [],
            step,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )
