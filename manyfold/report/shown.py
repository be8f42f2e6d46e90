"""What a page shows, whatever it was computed by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from manyfold.arrays import Array
from manyfold.estimate.ranking import Decision, Winner
from manyfold.estimate.stopping import Look
from manyfold.report.parts import ROOMY, fixed, shortest


@dataclass(frozen=True)
class Shown:
    """What a page shows.

    Attributes:
        title: what was evaluated, greedy or stochastic.
        own_returns: plain returns of the episodes that each policy ran itself; maybe none.
        warnings: for each policy "", or why its estimate can't be trusted and what to do.
        effective: effective sample sizes of the weights, `[K]`; None where there are none.
        looks: decisions on the way; none where it was made once.
        reason: why it ended, where it wasn't decided beforehand.
        about: command, environment, policies, data, seconds, seed and other settings, as far as they are known.
    """

    title: str
    decision: Decision
    winner: Winner
    episodes: int
    steps: int
    own_returns: tuple[Array, ...]
    warnings: Sequence[str]
    effective: Array | None = None
    looks: tuple[Look, ...] = ()
    reason: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Escaped."""
        return [escape(name) for name in self.decision.names]

    @property
    def sure(self) -> str:
        return f"{100 * (1 - self.decision.alpha):.4g}%"

    @property
    def height(self) -> int:
        """Of a row's picture."""
        return 26 if len(self.decision.names) <= ROOMY else 18

    @property
    def plain(self) -> bool:
        """Whether every value is the mean of the policy's own returns, so that no episode served another policy."""
        means = [x.mean() if len(x) else np.nan for x in self.own_returns]
        return bool(np.allclose(means, self.decision.sample.mean, rtol=1e-9, atol=1e-12))

    @property
    def on_policy(self) -> Array:
        """Own episodes that on-policy MC would need for the standard errors, Var(own returns) / SE^2, `[K]`; or NaN."""
        error = self.decision.sample.standard_error
        spread = np.array([x.var(ddof=1) if len(x) > 1 else np.nan for x in self.own_returns])
        return np.divide(spread, error**2, out=np.full_like(error, np.nan), where=(error > 0) & (spread > 0))

    @property
    def on_policy_total(self) -> float:
        """The same of all policies; of those where it is unknown, what they ran themselves."""
        ran = [len(x) for x in self.own_returns]
        return float(np.where(np.isnan(self.on_policy), ran, self.on_policy).sum())

    def name(self, k: int) -> str:
        """With a sign if it isn't to be trusted."""
        sign = (
            '\N{NO-BREAK SPACE}<span class="sign" title="not to be trusted">\N{WARNING SIGN}</span>'
            if self.warnings[k]
            else ""
        )
        return f"{self.names[k]}{sign}"

    def digits(self, signed: bool = False) -> Callable[[float], str]:
        """Writes values with as many digits after the point as their intervals leave meaningful, the same for all."""
        widths = self.decision.half_width
        known = widths[np.isfinite(widths) & (widths > 0)]
        if not len(known):
            return shortest(self.decision.sample.mean, signed)
        return fixed(int(np.clip(1 - np.floor(np.log10(known.min() / 2)), 0, 12)), signed)
