"""Every estimator that is reported is one entry here: its method, its label, its colour and its marker.

To add an estimator, add its method to `methods.METHODS` (and its return to `methods.RETURNS` if it is a new one) and an
entry here under the same name: tables, figures and MLflow follow.
"""

from dataclasses import dataclass

from manyfold.estimate.methods import METHODS, Method


@dataclass(frozen=True)
class Estimator:
    """An estimator as people see it."""

    method: Method
    label: str
    colour: str  # Okabe-Ito: the colour-blind can tell them apart
    marker: str


ESTIMATORS = {
    "on_policy": Estimator(METHODS["on_policy"], "On-policy MC", "#000000", "o"),
    "mpe": Estimator(METHODS["mpe"], "MPE", "#0072B2", "s"),
    "odi": Estimator(METHODS["odi"], "ODI", "#E69F00", "^"),
    "son": Estimator(METHODS["son"], "SON", "#56B4E9", "v"),
    "sodi": Estimator(METHODS["sodi"], "SODI", "#CC79A7", "D"),
    "mpe_baseline": Estimator(METHODS["mpe_baseline"], "MPE + q baseline", "#D55E00", "P"),
    "son_balanced": Estimator(METHODS["son_balanced"], "SON, balanced", "#009E73", "X"),
    "pooled": Estimator(METHODS["pooled"], "Pooled", "#8C564B", "*"),
}
