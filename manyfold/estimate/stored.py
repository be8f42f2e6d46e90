"""An evaluation that goes on from a store: earlier episodes first, then the missing ones.

Old episodes are weighed by the densities of the policies that ran them. So the store keeps a copy of every checkpoint's
file; policies without a file (torch modules, tables) are recognised again by their numbers when they are given again.
Episodes of policies that can't be asked any more are left out, and counted.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from manyfold.arrays import Ints
from manyfold.data.episode_files import Row, save
from manyfold.data.episodes import Episodes
from manyfold.data.store import Plan, Store
from manyfold.draws import Seeds
from manyfold.envs.base import Environment
from manyfold.estimate.collecting import Job, Shard, describe, spread
from manyfold.estimate.workers import Crew, shards
from manyfold.policies.base import PolicySet
from manyfold.policies.fitting import fitted
from manyfold.policies.imported import Imported, Options
from manyfold.policies.importing import load_file
from manyfold.policies.loading import together
from manyfold.policies.mlp import MlpPolicySet
from manyfold.policies.modules import ChosenPolicySet, JoinedPolicySet, ModulePolicySet, layout
from manyfold.policies.tabular import TabularPolicySet


def identities(policies: PolicySet) -> tuple[str, ...]:
    """What each policy is recognised by: its file and how it was read, or all of its numbers."""
    if policies.imported:
        return tuple(_digest(one.kind, *one.sha256, _said(one)) for one in policies.imported)
    if isinstance(policies, ModulePolicySet):
        state = [(layout(one), *(x.numpy().tobytes() for x in one.state_dict().values())) for one in policies.modules]
        if all(known is not None for known, *_ in state):
            return tuple(_digest(repr(policies.head), repr(known), *tensors) for known, *tensors in state)
    if isinstance(policies, TabularPolicySet):
        return tuple(_digest("table", one.tobytes()) for one in policies.table())
    if isinstance(policies, MlpPolicySet):
        said = repr({name: x for name, x in asdict(policies.spec).items() if name not in ("names", "env")})
        each = ([x[k].numpy().tobytes() for x in policies.tensors.values()] for k in range(policies.n_policies))
        return tuple(_digest("mlp", said, *tensors) for tensors in each)
    if isinstance(policies, JoinedPolicySet):
        return tuple(id for part in policies.parts for id in identities(part))
    if isinstance(policies, ChosenPolicySet):
        every = identities(policies.policies)
        return tuple(every[k] for k in policies.which)
    raise ValueError(
        f"policies of a {type(policies).__name__} can't be recognised again, expected files, torch modules or tables "
        "with a store"
    )


def _said(one: Imported) -> str:
    options = one.options or Options()
    return repr((options.head, options.greedy, options.epsilon, options.activation))


def _digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8))
        found.update(data)
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Saving:
    """Keeps a plan's episodes as they end; goes to other processes of this machine."""

    folder: Path
    plan: str
    ids: list[str]  # of the policy that runs each episode of the plan
    numbers: Ints
    seeds: Seeds
    size: int  # episodes of a shard

    def __call__(self, shard: Shard, ended: Ints, found: Episodes) -> None:
        ends = np.cumsum(found.lengths)
        rows = []
        for i, e in enumerate((shard.number * self.size + ended).tolist()):
            here = slice(int(ends[i] - found.lengths[i]), int(ends[i]))
            log_prob = found.log_loggers[found.logger[i], here]
            parts = found.states[here], found.actions[here], found.rewards[here], log_prob
            rows.append(Row(self.ids[e], int(self.numbers[e]), int(self.seeds[e]), *parts))
        save(self.folder, self.plan, rows)


class Stored:
    """A store, and the policies of an evaluation in it.

    Attributes:
        others: loggers of old episodes that are no targets, None if there are none.
        contents: the episodes that are known: those that were there at first, and our own; loggers by number.
        notes: what was left out, one line each.
    """

    def __init__(
        self,
        folder: str | Path,
        env: Environment,
        policies: PolicySet,
        seed: int,
        crew: Crew,
        progress: Callable[[str], None] = lambda said: None,
    ) -> None:
        self.store, self.env, self.policies, self.seed, self.crew = Store(folder, env), env, policies, seed, crew
        self.notes: list[str] = []
        self.ids = identities(policies)
        self._keep()
        self.contents = self.store.contents(())
        self.others, self.other_ids = self._load([id for id in self.store.counts() if id not in self.ids])
        self._finish(progress)
        self.contents = self.store.contents(self.every)

    @property
    def job(self) -> Job:
        return Job(self.env, self.policies, self.others)

    @property
    def every(self) -> tuple[str, ...]:
        """Ids of all loggers, targets first."""
        return (*self.ids, *self.other_ids)

    def _keep(self) -> None:
        for id, one in zip(self.ids, self.policies.imported, strict=False):
            options = one.options or Options()
            if options.head is None:
                asked = {name: getattr(options, name) for name in ("greedy", "epsilon", "activation")}
                normaliser = one.files[1].name if len(one.files) > 1 and one.files[1].suffix != ".data" else "none"
                about = {"name": one.name, "file": one.path.name, "normaliser": normaliser, **asked}
                self.store.keep_policy(id, one.files, one.sha256, about)

    def _load(self, ids: Sequence[str]) -> tuple[PolicySet | None, tuple[str, ...]]:
        """Earlier policies that can still be asked."""
        found, known, counts = [], [], self.store.counts() if ids else {}
        for id in ids:
            folder, why = self.store.policy(id), "it is no file, and was not given again"
            try:
                said = json.loads((folder / "about.json").read_text())
                normaliser = said["normaliser"] if said["normaliser"] == "none" else folder / said["normaliser"]
                asked = {name: said[name] for name in ("greedy", "epsilon", "activation")}
                found.append(load_file(folder / said["file"], Options(**asked, normaliser=normaliser)))
                known.append(id)
                continue
            except FileNotFoundError:
                pass
            except (ValueError, KeyError, TypeError) as error:
                why = " ".join(str(error).split())
            self.notes.append(f"{counts.get(id, 0)} stored episodes of policy {id} are left out: {why:.150}")
        loaded = fitted(together(found), self.env) if found else None
        if isinstance(loaded, PolicySet) and loaded.head == self.policies.head:
            return loaded, tuple(known)
        return None, ()

    def counts(self) -> Ints:
        """Known episodes of each target, `[K]`."""
        many = np.bincount(self.contents.policy, minlength=len(self.every))
        return np.array([many[self.ids.index(id)] for id in self.ids], dtype=np.int64)

    def episodes(self, which: Ints) -> Episodes:
        """Some of those that are known, as the present policies see them."""
        known = self.contents.chosen(which)
        logged = self.store.read(self.every, known, log_prob=False)
        assert logged is not None
        who = known.policy.astype(np.int64)
        return describe(self.job, logged.states, logged.t, logged.actions, logged.rewards, logged.lengths, who)

    def run(self, job: Job, which: Ints, counts: Ints, progress: Callable[[int], None] = lambda done: None) -> Episodes:
        """So many more episodes of some targets.

        Args:
            job: these targets, and the other loggers that the episodes are weighed with.
            which: their numbers, `[k]`.
            counts: episodes of each, `[k]`.
        """
        who, ids = spread(counts), [self.ids[k] for k in which]
        wanted: dict[str, int] = {}
        for id, many in zip(ids, counts.tolist(), strict=True):
            wanted[id] = wanted.get(id, 0) + many
        plan = self.store.plan(wanted, self.seed)
        given = dict(plan.first)
        episodes = []
        for k in who.tolist():
            episodes.append((ids[k], given[ids[k]]))
            given[ids[k]] += 1
        return self._execute(plan, job, who, episodes, progress)

    def _execute(
        self, plan: Plan, job: Job, who: Ints, episodes: list[tuple[str, int]], progress: Callable[[int], None]
    ) -> Episodes:
        seeds = self.store.seeds(plan.seed, episodes)
        parts = shards(job, who, seeds, self.crew.workers)
        numbers = np.array([number for _, number in episodes], dtype=np.int64)
        keep = Saving(self.store.folder, plan.id, [id for id, _ in episodes], numbers, seeds, len(parts[0].who))
        try:
            found = self.crew.run(job, parts, keep, progress)
        except BaseException:
            plan.file.close()  # whoever comes next may finish it
            raise
        if self.crew.interrupted:
            plan.file.close()
        else:
            self.store.finish(plan)
            self._add(plan)
        return found

    def _add(self, plan: Plan) -> None:
        """To what is known; others' new episodes wait for the next call, so that none comes in between two looks."""
        now = self.store.contents(self.every)
        keep = np.isin(now.keys, self.contents.keys)
        for policy, many in plan.count.items():
            number = now.number - plan.first[policy]
            keep |= (now.policy == self.every.index(policy)) & (number >= 0) & (number < many)
        self.contents = now.chosen(keep)

    def _finish(self, progress: Callable[[str], None]) -> None:
        """Episodes that were being run when a process was killed: by their own seeds, so that none is favoured."""
        for plan, missing in self.store.cut_off():
            known = {id: i for i, id in reversed(list(enumerate(self.every)))}
            if any(id not in known for id, _ in plan.episodes()):
                self.notes.append(
                    f"{len(plan.episodes()) - len(missing)} episodes of a run that was cut off are left out until its "
                    "policies are given again"
                )
                plan.file.close()
            elif missing:
                progress(f"finishing {len(missing)} episodes of a run that was cut off")
                who = np.array([known[id] for id, _ in missing], dtype=np.int64)
                self._execute(plan, self.job, who, missing, lambda done: None)
            else:
                self.store.finish(plan)
