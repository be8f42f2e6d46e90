"""Behavior policies from fits: the shared mu (MPE), the K of ODI, what they promise, and their export."""

from manyfold.design.behavior import Behavior
from manyfold.design.prediction import Prediction, cost, forecast, predict, recommend, similar, verdict

__all__ = ["Behavior", "Prediction", "cost", "forecast", "predict", "recommend", "similar", "verdict"]
