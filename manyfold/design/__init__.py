"""Behavior policies from fits: the shared mu (MPE), the K of ODI, what they promise, and their export."""

from manyfold.design.behavior import Behavior
from manyfold.design.prediction import Prediction, plan_problem, plan_weights, predict, similar, verdict

__all__ = ["Behavior", "Prediction", "plan_problem", "plan_weights", "predict", "similar", "verdict"]
