"""People's own logged data: read, checked, and turned into a q of the policies that are to be evaluated.

`read` takes what `data.formats` knows, of any loggers, with or without propensities (which no fit of ours needs), whole
episodes or tuples in any order that know their t. What follows a row is its next_state, or the next row of its episode.
A row whose successor nobody knows (cut off by a time limit, next_state not kept) is left out.

Memory is bounded: more than MOST_ROWS rows are sampled, each kept with the same probability, while the file is read as
a stream; only npz files are held whole.

`fit_q` fits q to them: a network for each policy where actions are counted (`fqe.engine`), a linear q where they are
vectors (`fqe.linear`). Our environments tell policies all that their dynamics depend on, so a row may serve other steps
than its own: half of the rows get a t from all of the horizon, since the evaluated policies may be elsewhere at t than
the loggers were. Were that wrong for an environment, or the data those of another one, q would be a bad control and
nothing worse: pooled evaluation stays unbiased whatever q is.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyfold.arrays import Bools, Ints, check_number
from manyfold.data.formats import Columns, sources
from manyfold.data.linking import Linked, linked
from manyfold.data.transitions import About, Transitions, Writer
from manyfold.envs.base import Environment
from manyfold.estimate.baselines import CLASSES, ActionValues, predicted, weighted
from manyfold.fqe.engine import Bounded, Config, fit
from manyfold.fqe.linear import Tuples, fit_linear
from manyfold.fqe.problems import q_problem
from manyfold.policies.base import PolicySet
from manyfold.streams import stream

MOST_ROWS = 2**18
HELD_OUT = 0.1  # of the rows, for the card
MOVED = 0.5  # of the rows, to other steps
FEWEST = 50  # rows to fit
LONGEST = 2**15 - 1  # horizon
SETTINGS = Config(learning_rate=3e-3, cosines=16, most_updates=3000)  # of networks: a minute for ten policies


@dataclass(frozen=True)
class Logged:
    """What was read: tuples (t, s, a, r, s') in the environment's own numbers, and where they are from."""

    rows: Tuples
    known: Bools  # s' is what followed; elsewhere the episode ended, and it is s itself, [N]
    found: int  # rows in the files
    episodes: int
    who: str
    propensities: bool

    def __str__(self) -> str:
        n, known = len(self.rows.t), "with" if self.propensities else "without"
        used = f"{n:,} of {self.found:,}" if n < self.found else f"{n:,}"
        who = self.who or "unknown policies"
        return f"{used} rows of {self.episodes:,} episodes, logged by {who}, {known} propensities"


class FittedValues(NamedTuple):
    """q, for `mf.evaluate(q=...)`, and what it is made of, in one line."""

    q: ActionValues
    card: str


def read(path: str | Path, env: Environment, seed: int = 0, most: int = MOST_ROWS) -> Logged:
    """Logged tuples that fit an environment; anything that doesn't is refused with one line.

    Args:
        path: a file (.parquet, .hdf5, .h5, .npz), a folder of them, or the folder of a Minari data set.
        most: rows to keep in memory; of more, a random sample is taken.
    """
    check_number("most", most, 1)
    found = sources(Path(path))
    total = sum(source.rows for source in found)
    rng, parts, episodes, usable = stream("data", env.name, seed), [], 0, 0
    for source in found:
        seen: set[int] = set()
        for part in linked(source, env):
            # What follows counts for nothing where the episode terminated or the horizon ended.
            good = part.known | part.terminated | (part.t == env.horizon - 1)
            usable += int(good.sum())
            parts.append(part.take(good & (rng.random(len(good)) < most / total)))
            seen.update(np.unique(part.episode).tolist())
            episodes += int(part.ends.sum()) if "episode" not in source.names else 0
        episodes += len(seen) if "episode" in source.names else 0
    if usable == 0:
        raise ValueError(f"{path}: {total} rows, expected logged transitions with their next states")
    if usable < total / 2:
        raise ValueError(
            f"{path}: next states of most rows are unknown, expected next_state, or episodes in their order"
        )
    joined = Linked._make(np.concatenate(x) for x in zip(*parts, strict=True))
    who = ", ".join(dict.fromkeys(source.who for source in found if source.who))
    propensities = all("propensity" in source.names for source in found)
    return Logged(Tuples._make(joined[:6]), joined.known, total, episodes, who, propensities)


def fit_q(
    path: str | Path,
    env: Environment,
    policies: PolicySet,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
    config: Config = SETTINGS,
) -> FittedValues:
    """q of all policies from logged data, as a baseline for pooled evaluation, and a line about it.

    Args:
        path: as `read` takes it.
        progress: sees what is being done.
        config: of the networks, where actions are counted.
    """
    check_number("horizon", env.horizon, 1, LONGEST)
    progress(f"reading {path}")
    logged = read(path, env, seed)
    rng = stream("q", env.name, seed)
    rows = _other_steps(logged, env.horizon, rng)
    if policies.head is not None:
        rows = rows._replace(action=policies.head.meant(rows.action))
    held_out = rng.random(len(rows.t)) < HELD_OUT
    train, rest = rows.take(~held_out), rows.take(held_out)
    if len(train.t) < FEWEST or not len(rest.t):
        raise ValueError(f"{path}: {len(rows.t)} rows with a known next state, expected at least {2 * FEWEST} to fit q")
    q: ActionValues
    if policies.head is None:
        q = _networks(train, env, policies, rng, progress, config)
    else:
        told = lambda share: progress(f"fitting q: {share:.0%}")  # noqa: E731
        q = fit_linear(train, policies, policies.head, env.horizon, told)
    share = explained(q, policies, rest, env.horizon)
    return FittedValues(q, f"{logged}; q explains {share:.2f} of the squared error on held-out rows")


def explained(q: ActionValues, policies: PolicySet, rows: Tuples, horizon: int) -> float:
    """1 - sum (r + c v(s') - q(s, a))^2 / sum (r + c v(s') - its mean at about that t)^2, over all policies.

    c is 0 where s' is terminal or the horizon ends. Even the true q leaves what nobody can know before a step.
    """
    on, after, every = rows.goes_on(horizon), np.minimum(rows.t + 1, horizon - 1), np.arange(len(rows.t))
    if policies.head is None:
        at_taken = predicted(q, rows.state, rows.t)[:, every, rows.action]
        v = (policies.probs(rows.next_state, after) * predicted(q, rows.next_state, after)).sum(-1)
    else:
        w, later = weighted(q, rows.state, rows.t), weighted(q, rows.next_state, after)
        at_taken = w[..., 0] + np.einsum("knb,nb->kn", w[..., 1:], policies.head.features(rows.action))
        expected = policies.head.expected(policies.parameters(rows.next_state, after))
        v = later[..., 0] + (later[..., 1:] * expected).sum(-1)
    target = rows.reward + on * v  # [K, N]
    classes = min(horizon, CLASSES)
    of_class = (rows.t * classes // horizon)[:, None] == np.arange(classes)  # [N, classes]
    mean = (target @ of_class) / np.maximum(of_class.sum(0), 1)
    spread = ((target - mean @ of_class.T) ** 2).sum()
    return float(1 - ((target - at_taken) ** 2).sum() / spread) if spread > 0 else 0.0


def _other_steps(logged: Logged, horizon: int, rng: np.random.Generator) -> Tuples:
    """Half of the rows at a t drawn from all of the horizon, and all that were logged beyond it.

    A row of the last step that terminated, or whose successor nobody knows, keeps its t: perhaps it was only the
    horizon that ended its episode.
    """
    rows, last = logged.rows, logged.rows.t == horizon - 1
    drawn = rng.integers(horizon, size=len(rows.t))
    move = (rng.random(len(rows.t)) < MOVED) & ~(last & (rows.terminated | ~logged.known))
    return rows._replace(t=np.where(move | (rows.t >= horizon), drawn, rows.t))


def _networks(
    rows: Tuples,
    env: Environment,
    policies: PolicySet,
    rng: np.random.Generator,
    progress: Callable[[str], None],
    config: Config,
) -> ActionValues:
    """A network for each policy, where actions are counted."""
    n = len(rows.t)
    columns: Columns = {**rows._asdict(), "episode": np.zeros(n), "truncated": np.zeros(n, dtype=np.bool_)}
    reward, weights = q_problem(policies)
    lowest, highest = min(0.0, rows.reward.min()), max(0.0, rows.reward.max())

    def inside(states: NDArray[np.float32], t: Ints) -> Bounded:
        """Next values are sums of at most T - t rewards: where no logger has been, networks would run away."""
        pi = np.asarray(weights(states, t))
        left = np.broadcast_to((env.horizon - t)[:, None], pi.shape)
        return Bounded(pi, lowest * left, highest * left)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        with Writer(path, About(env.name, env.horizon, env.n_actions, env.width, 0)) as writer:
            writer.write(columns)
        told = lambda check, updates: progress(f"fitting q: {check.update / updates:.0%}")  # noqa: E731
        return fit(Transitions(path), reward, inside, rng, config, env.n_states, told).nets
