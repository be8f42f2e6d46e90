"""Before any episode is spent: what is wrong with these policies in this environment? One line each.

A few hundred steps of the environment are made (said in the last line: it is no evaluation), and everything else is
asked at the observations that the policies met there.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from torch import nn

from manyfold.arrays import Array, check_actions
from manyfold.envs.base import Environment
from manyfold.policies.actors import ActorSet
from manyfold.policies.base import PolicySet, sample_actions
from manyfold.policies.cleanrl import UNNORMALISED_NOTE
from manyfold.policies.fitting import fitted
from manyfold.policies.heads import Actions, Gaussian
from manyfold.policies.imported import NO_DENSITY_NOTE, Imported
from manyfold.policies.layers import StateDependentNoise
from manyfold.policies.modules import ModulePolicySet
from manyfold.policies.probing import PolicyFailed, Probes, asked, probe, said_at
from manyfold.policies.ratios import misfits
from manyfold.streams import stream

LEVELS = ("error", "warning", "note", "ok")  # in the order they are shown
DRAWS = 4096  # of each policy, at all places together
FALSE_ALARM = 0.001  # probability that right densities are called wrong, all policies together
SAME = 1e-4  # the same numbers up to rounding, which depends on how many rows are computed at once
SEEN = 10.0  # deviations from the mean, where a normaliser does not clip
RARE = 0.01  # a share of probes that is not worth a line


@dataclass(frozen=True)
class Finding:
    """One line: what, where, what to do; its level is "error", "warning", "note" or "ok"."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {' '.join(self.text.split())}"


def check(env: Environment, policies: PolicySet | ActorSet, seed: int = 0) -> list[Finding]:
    """All findings: errors, warnings, notes, and one "ok" that says what was checked, unless the probes failed.

    An environment that crashes raises a ValueError.
    """
    found = [*_files(policies.imported), *_normalisers(policies.imported)]
    try:
        ready = fitted(policies, env)
    except ValueError as error:
        return _sorted([*found, Finding("error", str(error))])
    try:
        probes = probe(env, ready, seed)
        found += [*_environment(env, probes, seed), *_ranges(policies.imported, env, probes)]
        more = _of_densities(ready, env, probes, seed) if isinstance(ready, PolicySet) else [_plain(ready)]
    except PolicyFailed as error:
        return _sorted([*found, Finding("error", f"{error}; nothing more could be checked")])
    found += more
    return _sorted([*found, _checked(env, ready, probes, any(one.level in LEVELS[:2] for one in found))])


def _sorted(found: Sequence[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _who(names: Sequence[str], which: Iterable[int]) -> str:
    """Some policies in words: at most three names."""
    chosen = list(which)
    if len(chosen) == len(names) > 1:
        return f"all {len(names)} policies" if len(names) > 2 else "both policies"
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    return ", ".join(names[k] for k in chosen[:3]) + more


# What the files say -------------------------------------------------------------------------------------------------


def _files(imported: Sequence[Imported]) -> list[Finding]:
    """The importers' notes, one line for all files of which the same is true."""
    names, groups, texts = [one.name for one in imported], dict[str, list[int]](), dict[str, dict[str, None]]()
    for k, one in enumerate(imported):
        for note in one.notes:
            key = re.sub(rf"(?<!\w){re.escape(one.path.stem)}(?!\w)", "*", note)
            for number in re.findall(r"\d+", one.path.stem):
                key = key.replace(number, "#")
            groups.setdefault(key, []).append(k)
            texts.setdefault(key, {})[note] = None
    wrong = UNNORMALISED_NOTE.split(";")[0], "the same policy as"
    found = []
    for key, which in groups.items():
        text, own = next(iter(texts[key])), " (and so on, each by its own)" if len(texts[key]) > 1 else ""
        found.append(Finding("warning" if text.startswith(wrong) else "note", f"{_who(names, which)}: {text}{own}"))
    return found


def _normalisers(imported: Sequence[Imported]) -> list[Finding]:
    """Some with, some without; or one for all, which fits one moment of training only."""
    found, names = [one.normaliser for one in imported], [one.name for one in imported]
    have = [part for part in found if part is not None]
    if not have or len(found) < 2:
        return []
    if len(have) < len(found):
        without = [k for k, part in enumerate(found) if part is None]
        text = f"{_who(names, without)}: no normaliser, while others have one; put its statistics beside each file"
        return [Finding("warning", text)]
    if all(part.mean.equal(have[0].mean) and part.std.equal(have[0].std) for part in have[1:]):
        text = (
            "one normaliser's statistics for all, which fit one moment of training; a checkpoint from another moment "
        )
        text += "is another policy with them: save them with each (CheckpointCallback(save_vecnormalize=True))"
        return [Finding("warning", f"{_who(names, range(len(names)))}: {text}")]
    return []


# The environment ----------------------------------------------------------------------------------------------------


def _environment(env: Environment, probes: Probes, seed: int) -> list[Finding]:
    """Does the same seed give the same episode, and do episodes end?"""
    found = []
    running, first = env.open(1, stream("check", env.name, seed, "env")), np.zeros(1, dtype=np.int64)
    obs = running.reset(first)
    own = np.flatnonzero(probes.which == 0)
    for i in own:
        if not np.array_equal(obs[0], probes.obs[i]):
            where = (
                "reset(seed=...) gives another start" if i == 0 else f"after {i} steps the same actions led elsewhere"
            )
            text = f"{where} with the same seed; results can't be repeated and starts aren't common: draw from "
            found.append(Finding("warning", f"{env.name}: {text}self.np_random after super().reset(seed=seed)"))
            break
        if i + 1 < len(own):
            obs = running.step(probes.sent[i])[0]
            obs = running.reset(first) if running.done[0] else obs
    if not probes.ended and env.time_limit != env.horizon:  # its own limit is what was meant
        most = int(probes.t.max()) + 1
        text = f"{env.name}: no episode ended by itself within {most:,} steps; "
        text += f"the horizon ends all of them after {env.horizon:,}: is that what is to be evaluated?"
        found.append(Finding("note", text))
    return found


def _ranges(imported: Sequence[Imported], env: Environment, probes: Probes) -> list[Finding]:
    """Observations outside of what a policy has seen: by its normaliser's statistics, and by its file's bounds."""
    found: list[Finding] = []
    names = [one.name for one in imported]
    far: dict[int, tuple[float, list[int]]] = {}
    out: dict[int, list[int]] = {}
    for k, one in enumerate(imported):
        obs = np.asarray(probes.obs[probes.which == k], np.float64)
        part = one.normaliser
        if part is not None and part.mean.numel() == env.width:
            limit = min(float(part.clip), SEEN)
            outside = np.abs(obs - part.mean.numpy()) > limit * part.std.numpy()
            if (share := float(outside.any(1).mean())) > RARE:
                far[k] = share, np.flatnonzero(outside.mean(0) > RARE).tolist()
        if one.obs_low is not None and one.obs_high is not None and len(one.obs_low) == env.width:
            low, high = np.array(one.obs_low), np.array(one.obs_high)
            slack = 1e-6 * (1 + np.abs(obs))
            if (beyond := ((obs < low - slack) | (obs > high + slack)).any(0)).any():
                out[k] = np.flatnonzero(beyond).tolist()
    if far:
        k = max(far, key=lambda k: far[k][0])
        text = f"{_who(names, far)}: observations outside of what the normaliser has seen in up to {far[k][0]:.0%} of "
        text += (
            f"the probes (numbers {far[k][1]!s:.40} of {names[k]}); are the statistics this policy's, and are units "
        )
        found.append(Finding("warning", text + "and wrappers those of training?"))
    if out:
        k = next(iter(out))
        text = (
            f"{_who(names, out)}: observations outside of the bounds in the file (numbers {out[k]!s:.40}); is it the "
        )
        found.append(Finding("warning", text + "environment it was trained in, with the same wrappers?"))
    return found


# The policies -------------------------------------------------------------------------------------------------------


def _plain(actors: ActorSet) -> Finding:
    text = f"{_who(actors.names, range(actors.n_policies))}: {actors.how}, no densities: plain returns from common "
    text += "starts, where an episode tells of its own policy only"
    sampling = all(one.greedy and NO_DENSITY_NOTE not in one.notes for one in actors.imported)
    return Finding("note", text + ("; load them without --greedy to share episodes" if sampling else ""))


def _of_densities(policies: PolicySet, env: Environment, probes: Probes, seed: int) -> list[Finding]:
    names, rng = policies.names, stream("check", "draws", seed)
    said = said_at(policies, probes.obs, probes.t)  # [K, N, A or P]
    found = [*_memory(policies, probes, said), *_alike(policies, said)]
    places = probes.places
    obs, t = probes.obs[places], probes.t[places]
    repeats = -(-DRAWS // len(places))
    head, here = policies.head, said[:, places]
    kept: dict[int, Actions] = {}

    def draw(k: int) -> Actions:
        rows = np.repeat(np.arange(len(places)), repeats)
        if head is not None:
            kept[k] = asked(lambda: head.draw(here[k, rows], rng), names[k])
            return kept[k]
        if type(policies).sample is not PolicySet.sample:
            taken = asked(lambda: policies.sample(np.full(len(rows), k), obs[rows], t[rows], rng), names[k])
            asked(lambda: check_actions(taken, policies.n_actions), names[k])
            return np.asarray(taken)
        return sample_actions(here[k, rows], rng)  # what PolicySet.sample does, without asking for every draw

    for k, copy, mean, tolerance, draws in misfits(head, here, draw, repeats, FALSE_ALARM):
        text = f"{names[k]}: its density does not fit its {draws:,} draws: the mean ratio to a copy of itself ({copy}) "
        text += f"is {mean:.4f}, expected 1 +- {tolerance:.4f}; are probabilities and samples of the same policy, "
        found.append(Finding("error", text + "temperature and deviation?"))
    return [*found, *_bounds(names, head, env, kept)] if isinstance(head, Gaussian) else found


def _memory(policies: PolicySet, probes: Probes, said: Array) -> list[Finding]:
    """Policies whose answer depends on what was asked before, or beside it: recurrence, noise, batch statistics."""
    found = []
    back = np.arange(len(probes.t))[::-2]
    again = said_at(policies, probes.obs[back], probes.t[back])
    off = (np.abs(again - said[:, back]) > SAME * (1 + np.abs(again))).any((1, 2))
    if policies.head is None and type(policies).probs_of is not PolicySet.probs_of:
        rows = np.arange(len(probes.t))
        own = np.stack([policies.probs_of(np.full(len(rows), k), probes.obs, probes.t) for k in range(len(said))])
        off |= (np.abs(own - said) > SAME).any((1, 2))
    if off.any():
        text = (
            f"{_who(policies.names, np.flatnonzero(off))}: asked again at the same observations, other probabilities; "
        )
        text += "a policy may depend on the observation and t only: no memory (put it into the observation), no noise"
        found.append(Finding("error", text))
    modules = policies.modules if isinstance(policies, ModulePolicySet) else []
    kinds = [tuple(type(part) for part in module.modules()) for module in modules]
    recurrent = [k for k, parts in enumerate(kinds) if any(issubclass(p, nn.RNNBase | nn.RNNCellBase) for p in parts)]
    if recurrent:
        text = f"{_who(policies.names, recurrent)}: recurrent layers, whose memory is not carried from step to step"
        found.append(Finding("warning", f"{text}; evaluate it by its own episodes, as an ActorSet that keeps it"))
    noisy = [k for k, parts in enumerate(kinds) if StateDependentNoise in parts]
    if noisy and not policies.imported:  # a file's notes say it
        text = (
            f"{_who(policies.names, noisy)}: gSDE, whose noise is drawn afresh at every step here, with its marginal "
        )
        found.append(Finding("note", text + "density; in training one exploration matrix lasted for many steps"))
    return found


def _alike(policies: PolicySet, said: Array) -> list[Finding]:
    """Identical policies, and deterministic ones."""
    found, names, seen = [], policies.names, dict[bytes, list[int]]()
    sure = np.zeros(len(names), dtype=np.bool_)
    if policies.head is None:
        sure = (said.max(-1) == 1).all(-1)
    for k in range(len(names)):
        seen.setdefault(said[k].tobytes(), []).append(k)
    for twins in seen.values():
        files = {one.sha256 for k in twins for one in policies.imported[k : k + 1]}
        if len(twins) > 1 and len(files) != 1:  # of one file twice, its note tells
            level = "note" if sure[twins[0]] else "warning"
            same = "actions" if sure[twins[0]] else "probabilities"
            text = f"{_who(names, twins)}: the same {same} at every probe; one of them is enough"
            found.append(Finding(level, text))
    if sure.any():
        text = (
            f"{_who(names, np.flatnonzero(sure))}: deterministic, probability 1 everywhere: episodes of others tell of "
        )
        text += "it only while they act alike, so that next to nothing is shared; let it sample if it can"
        found.append(Finding("note", text))
    return found


def _bounds(names: Sequence[str], head: Gaussian, env: Environment, drawn: dict[int, Actions]) -> list[Finding]:
    """Bounds of another environment, and how much is clipped."""
    found = []
    if isinstance(env.action_space, spaces.Box):
        own, its = [head.low, head.high], [np.ravel(env.action_space.low), np.ravel(env.action_space.high)]
        if not np.allclose(own, its, rtol=1e-4):
            text = f"{_who(names, range(len(names)))}: actions from {min(head.low):g} to {max(head.high):g}, "
            text += f"{env.name} takes {its[0].min():g} to {its[1].max():g}; is a wrapper of training missing?"
            found.append(Finding("warning", text))
    shares = {} if head.squashed else {k: float((head.sent(x) != x).mean()) for k, x in drawn.items()}
    if max(shares.values(), default=0.0) > RARE:
        listed = ", ".join(f"{names[k]} {share:.0%}" for k, share in list(shares.items())[:5])
        rest = list(shares.values())[5:]
        more = f" and {len(rest)} more {min(rest):.0%} to {max(rest):.0%}" if rest else ""
        text = (
            f"actions clipped at the bounds: {listed}{more}; estimates stay right (the density is that of the action "
        )
        found.append(Finding("note", text + "before it is clipped), but was training clipped in the same way?"))
    return found


def _checked(env: Environment, policies: PolicySet | ActorSet, probes: Probes, wrong: bool) -> Finding:
    k = policies.n_policies
    what = f"{k} {'policy' if k == 1 else 'policies'} ({policies.how}) in {env.name}: spaces, seeds, ranges"
    if isinstance(policies, PolicySet):
        what += f", memory, densities by {DRAWS:,} draws of each"
    text = f"{'the rest of what was checked:' if wrong else 'checked'} {what}; it took {len(probes.t)} steps of "
    return Finding("ok", text + f"{probes.episodes} short episodes, which is no evaluation")
