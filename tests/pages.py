"""Results to show, and their pages read back."""

import xml.etree.ElementTree as ET
from typing import NamedTuple

import numpy as np

import manyfold as mf
from manyfold.envs.base import Finite
from manyfold.estimate.stopping import Played, Returns, until
from manyfold.mdp import FiniteMDP
from manyfold.policies import TabularPolicySet
from manyfold.report.page import Shown


def pooled(k=4, episodes=80, seed=0, **how):
    """Of policies in a small random MDP."""
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.ones(5), size=(5, 3))
    mdp = FiniteMDP(transitions, rng.standard_normal((5, 3)) + 1, np.full(5, 0.2), 5)
    base, own = rng.dirichlet(np.ones(3), size=(1, 1, 5)), rng.dirichlet(np.ones(3), size=(k, 1, 5))
    policies = TabularPolicySet(np.repeat(0.5 * base + 0.5 * own, 5, 1))
    return mf.evaluate(Finite(mdp), policies, episodes, seed, **how)


def stopped(k=4, budget=400, seed=0, **how):
    """Of plain normal returns with means 0, 1, 2, ..."""
    rng = np.random.default_rng(seed)

    def run(which, rounds):
        return Played(which[:, None] + rng.standard_normal((len(which), rounds)), 7 * len(which) * rounds)

    return until(Returns([f"p{i}" for i in range(k)], run), budget=budget, **how)


def shown(values, own_returns=None, names=None, **more):
    """A page's content from values `[K, N]` of one decision."""
    values = np.asarray(values, dtype=np.float64)
    own = tuple(values if own_returns is None else [np.asarray(x, dtype=np.float64) for x in own_returns])
    names = tuple(names or (f"p{i}" for i in range(len(values))))
    decision = mf.decide(mf.sample(values, names=names))
    given = {"warnings": [""] * len(names), "episodes": sum(map(len, own)), "steps": 100, "title": "a title", **more}
    return Shown(decision=decision, winner=mf.winner(values), own_returns=own, **given)


class Page(NamedTuple):
    """What is between <main> and </main>, which is XML."""

    main: ET.Element

    @property
    def text(self):
        return " ".join(" ".join(self.main.itertext()).split())

    def section(self, title):
        """The section under a heading, or None."""
        return next((x for x in self.main.iter("section") if x.find("h2").text == title), None)

    def table(self, title):
        """Header and rows of the last table of a section: texts of cells, without pictures."""
        *_, found = self.section(title).iter("table")
        rows = [[_text(x) for x in row if "picture" not in x.get("class", "")] for row in found.iter("tr")]
        return [row for row in rows if any(row)]

    def marks(self, title):
        """The pictures of a section's rows."""
        return [x for x in self.section(title).iter("svg") if x.get("class") == "track"]


def _text(x):
    return " ".join(" ".join(x.itertext()).split())


def read(path):
    text = path.read_text(encoding="utf-8")
    return Page(ET.fromstring(text[text.index("<main>") : text.index("</main>") + len("</main>")]))


def number(text):
    """As people write it."""
    return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-").replace("\N{INFINITY}", "inf").strip("()+"))


def rounding(text):
    """Half of the last digit."""
    return 0.5001 * 10.0 ** -len(text.strip("()").partition(".")[2])
