"""One evaluation of the checkpoints of a watched folder, for `tasks.watch`: load, evaluate, record, note.

Only what has been noted is done: whoever is killed before has left episodes in the store, where the next time starts.
"""

import datetime
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyfold import envs
from manyfold.data.store import Store
from manyfold.door import evaluate as evaluate_policies
from manyfold.envs.base import Environment
from manyfold.estimate.evaluation import Estimate
from manyfold.estimate.stopping import Stopped
from manyfold.estimate.stored import identities
from manyfold.files import write_json
from manyfold.policies.actors import ActorSet
from manyfold.policies.base import PolicySet
from manyfold.policies.imported import Options
from manyfold.policies.importing import find_files, load_file
from manyfold.policies.loading import load_policies
from manyfold.tracking import Experiment
from tasks import studies
from tasks.locks import Taken, one_run
from tasks.params import ROOT
from tasks.watch import OPTIONS, Asked, Files, last, news, nothing_new, read_seen

SEED = 0


def evaluate(asked: Asked) -> str:
    """Evaluates what is new; a sentence for a person. Two at once: the second does nothing."""
    try:
        with one_run("watch", asked.study, asked.folder.parents[1]):
            found = news(asked)  # again: another one may just have ended
            return _evaluate(asked, found.settled) if found.new else nothing_new(asked, found)
    except Taken:
        return f"Another evaluation of {asked.study} is at work: nothing done"


def _evaluate(asked: Asked, settled: Files) -> str:
    torch.set_num_threads(1)  # the networks are small
    options = {name: asked.how[name] for name in OPTIONS if asked.how.get(name)}
    found, before = readable(asked, settled, Options(**options)), read_seen(asked)
    for path, why in found.left_out.items():
        print(f"{path} is left out: {why}", file=sys.stderr, flush=True)
    seen = {"how": asked.how, "files": settled, "policies": before.get("policies", [])}
    number = (last(asked.folder) or {"number": 0})["number"] + 1
    if not found.paths:
        write_json(asked.folder / "seen.json", seen)
        return f"No checkpoint in {asked.where} can be read yet{_left_out(found.left_out)}"
    try:
        env, policies = environment(asked), load_policies(found.paths, **options)
        known = identities(policies) if isinstance(policies, PolicySet) else ()  # others are refused below
        if known and before.get("how") == asked.how and set(known) <= set(seen["policies"]):
            write_json(asked.folder / "seen.json", seen)  # other files than policies, or the same policies again
            return f"Nothing new in {asked.where}: the same {len(known)} policies{_left_out(found.left_out)}"
        experiment = Experiment(asked.study, ROOT)  # one that can't be written is refused before an episode is run
        result, about, spent = run(asked, env, policies)
    except ValueError:
        if found.used != {name: _said(Path(name)) for name in found.used}:
            return f"Checkpoints in {asked.where} changed while they were read: the next time"
        raise
    page = result.report(
        asked.folder / "page.html", study=asked.study, evaluation=number, seconds=spent["seconds"], **about
    )
    recorded = record(experiment, asked.study, number, result, about, spent, page)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    said = {"number": number, "study": asked.study, "time": when, **result.summary(), **spent, "about": about}
    said |= {"left_out": found.left_out, "mlflow_run": recorded}
    write_json(asked.folder / f"{number:04d}.json", said)
    write_json(asked.folder / "seen.json", {**seen, "policies": known})
    print(result, flush=True)
    episodes = f"{spent['episodes.known']:,} episodes were there, {spent['episodes.run']:,} were run"
    left_out = _left_out(found.left_out)
    return f"Evaluation {number} of {asked.study}: {len(known)} policies; {episodes}{left_out}. {said['verdict']}"


# --- the checkpoints --------------------------------------------------------------------------------------------------


class Readable(NamedTuple):
    """Checkpoints that can be read."""

    paths: list[Path]
    used: Files  # they and their normalisers
    left_out: dict[str, str]  # others that have settled, and why


def readable(asked: Asked, settled: Files, options: Options) -> Readable:
    """Those that have settled together with all of their files, and can be read: one that is half written can't."""
    paths: list[Path] = []
    used: Files = {}
    left_out: dict[str, str] = {}
    try:
        every = find_files(asked.patterns)
    except ValueError:  # none yet
        every = []
    for path in every:
        if str(path) not in settled:
            continue
        try:
            files = load_file(path, options).files
            about = {str(file): _said(file) for file in files}
        except (ValueError, OSError) as error:
            left_out[str(path)] = " ".join(str(error).split())
            continue
        if all(time.time() - when / 1e9 >= asked.settle for _, when in about.values()):
            paths.append(path)
            used |= about
    return Readable(paths, used, left_out)


def _said(file: Path) -> list[int]:
    """Size and time, as `tasks.watch` has them; nothing of a file that is gone."""
    try:
        about = file.stat()
    except FileNotFoundError:
        return []
    return [about.st_size, about.st_mtime_ns]


def _left_out(files: dict[str, str]) -> str:
    return f" ({len(files)} left out: {next(iter(files.values())):.200})" if files else ""


def environment(asked: Asked) -> Environment:
    """By the study's section, or by --env."""
    if "env" in asked.how:
        return envs.make(asked.how["env"], asked.how["horizon"])
    study = studies.read(asked.study)
    env: Any = studies.make_environment(study, 0)
    ((_, arguments),) = study.environment.items()
    if kwargs := arguments.get("kwargs"):
        env.settings = dict(kwargs)  # by which a store knows its environment again
    made: Environment = env
    return made


# --- the evaluation ---------------------------------------------------------------------------------------------------


def run(
    asked: Asked, env: Environment, policies: PolicySet | ActorSet
) -> tuple[Estimate | Stopped, dict[str, Any], dict[str, int | float]]:
    """The result, how it came about, and what it cost."""
    how, begun = asked.how, time.monotonic()
    store = Store(asked.store, env)
    before = sum(store.counts().values())
    result = evaluate_policies(
        env,
        policies,
        how["budget"],
        SEED,
        stop=how["stop"],
        precision=how["precision"],
        alpha=how["alpha"],
        store=asked.store,
        workers=asked.workers,
        progress=lambda what: print(what, file=sys.stderr, flush=True),
    )
    if isinstance(result, Stopped) and result.reason.startswith("Interrupted"):
        raise KeyboardInterrupt
    after = sum(store.counts().values())
    about = {"environment": env.name, "policies": policies.how, "store": str(asked.store), "seed": SEED}
    about |= {name: how[name] for name in ("precision", "stop", "budget")}
    seconds = round(time.monotonic() - begun, 3)
    return result, about, {"seconds": seconds, "episodes.known": before, "episodes.run": after - before}


def record(
    experiment: Experiment,
    study: str,
    number: int,
    result: Estimate | Stopped,
    about: dict[str, Any],
    spent: dict[str, int | float],
    page: Path,
) -> str:
    """A run of its own, and a point in the study's series, of which it is a child; the run's id."""
    try:
        series = experiment.series(f"{study}, watched")
        tags = {"mlflow.parentRunId": series, "evaluation": str(number)}
        experiment.drop(tags)  # what a killed one has left
        tags |= {"mlflow.runName": f"evaluation {number}", "study": study}
        made = experiment.log(result, about, spent, page, tags)
        experiment.go_on(series, number, result, spent)
        experiment.client.log_artifact(series, str(page))
        return made
    except Exception as error:  # of MLflow, its database or the network
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(f"MLflow: {said:.200}; the episodes are in the store, the next time records them") from None
