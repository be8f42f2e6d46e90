"""The command `manyfold`: which of these policies is best, and how sure is that?

manyfold evaluate --env CartPole-v1 --policies 'checkpoints/*.zip' --episodes 200 --report report.html
manyfold check --env CartPole-v1 --policies 'checkpoints/*.zip'
manyfold gate --env CartPole-v1 --baseline current.zip --candidate new.zip
manyfold study new my-robot --env CartPole-v1 --policies 'checkpoints/*.zip'
"""

import argparse
import contextlib
import errno
import io
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from manyfold import processes

BAD_INPUT, BETTER, WORSE, UNKNOWN = 2, 0, 1, 3  # exit codes

EVALUATE = """\
Runs the policies in turns; every episode serves all of them. Ends with a ranked table, intervals that hold for all
policies at once, and, with --report, a page to show.

examples:
  manyfold evaluate --env CartPole-v1 --policies 'checkpoints/*.zip' --episodes 200 --report report.html
  manyfold evaluate --env Acrobot-v1 --policies runs/ --stop best --store evals/
  manyfold evaluate --env my_package.envs:make --horizon 500 --policies a.zip b.zip --precision 5

--policies takes files, patterns in quotes, or folders: Stable-Baselines3 zips, CleanRL models, ONNX and torch.export
programs, and what manyfold saved. No pickle is run. VecNormalize statistics are read from a file beside the checkpoint.
"""
GATE = """\
Is the candidate better than the baseline? For a CI job: exit code 0: better, 1: worse, 3: not told apart within the
budget, 2: bad input. Episodes are run until it is known, and the probability of a wrong answer is at most --alpha.
"""
CHECK = """\
Before any episode is spent: do the policies fit the environment, do their densities fit what they draw, are actions
clipped, is a normaliser missing? One line each: what, where, what to do. Exit code 0, or 1 if something is wrong.
"""


class Parser(argparse.ArgumentParser):
    """Its errors are one line, as all of the command's."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> Parser:
    """All subcommands."""
    found = Parser(prog="manyfold", description="Evaluate many policies with manyfold fewer episodes.")
    found.add_argument("--version", action="store_true", help="print the version and exit")
    commands = found.add_subparsers(dest="command", metavar="{evaluate,check,gate,study}")
    raw = argparse.RawDescriptionHelpFormatter
    evaluate = commands.add_parser("evaluate", help="which policy is best?", description=EVALUATE, formatter_class=raw)
    _common(evaluate)
    _policies(evaluate)
    amount = evaluate.add_argument_group("how many episodes (one of the first three)")
    amount.add_argument("--episodes", type=int, metavar="N", help="so many in all, of all policies together")
    amount.add_argument("--stop", choices=("best", "order"), help="until the best one, or the whole order, is known")
    amount.add_argument("--precision", type=float, metavar="X", help="until every value is known to +- X")
    amount.add_argument("--budget", type=int, metavar="N", help="with --stop or --precision: at most so many (10,000)")
    evaluate.add_argument(
        "--data", metavar="PATH", help="logged data: Parquet, Minari, HDF5 or npz; fits a q from them"
    )
    evaluate.add_argument("--store", metavar="FOLDER", help="keep all episodes there, and use those that are there")
    _outputs(evaluate)
    check = commands.add_parser("check", help="before any episode is run", description=CHECK, formatter_class=raw)
    _common(check)
    _policies(check)
    gate = commands.add_parser("gate", help="for CI: is the new one better?", description=GATE, formatter_class=raw)
    _common(gate)
    gate.add_argument("--baseline", required=True, metavar="FILE", help="the policy that is in use")
    gate.add_argument("--candidate", required=True, metavar="FILE", help="the policy that may replace it")
    gate.add_argument("--budget", type=int, default=2000, metavar="N", help="episodes at most (2,000)")
    gate.set_defaults(stop="best", episodes=None, precision=None, data=None, store=None)
    _outputs(gate)
    commands.add_parser("study", help="new: a study of your own through the pipeline, in a clone of the repository")
    return found


def _common(command: argparse.ArgumentParser) -> None:
    where = command.add_argument_group("environment and policies")
    where.add_argument("--env", required=True, metavar="ID", help="a Gymnasium id, or module:function that makes one")
    where.add_argument("--env-kwargs", metavar="JSON", help="arguments of the environment, for example '{\"mode\": 1}'")
    where.add_argument("--horizon", type=int, metavar="T", help="steps of an episode at most (its TimeLimit)")
    where.add_argument("--greedy", action="store_true", help="the most likely action instead of a sample")
    where.add_argument("--epsilon", type=float, metavar="E", help="of DQN's epsilon-greedy policies (the file's)")
    where.add_argument(
        "--activation", metavar="NAME", help="of networks whose file doesn't say (the library's default)"
    )
    where.add_argument(
        "--trust", action="store_true", help="run code that files bring along (torch.export, TorchScript)"
    )
    where.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same result (0)")


def _policies(command: argparse.ArgumentParser) -> None:
    command.add_argument("--policies", required=True, nargs="+", metavar="PATH", help="files, 'patterns' or folders")


def _outputs(command: argparse.ArgumentParser) -> None:
    out = command.add_argument_group("decisions and output")
    out.add_argument("--alpha", type=float, default=0.05, metavar="P", help="the probability of a wrong claim (0.05)")
    out.add_argument("--workers", type=int, default=0, metavar="N", help="processes for the episodes (all cores)")
    out.add_argument("--dask", metavar="ADDRESS", help="a Dask scheduler that runs the episodes instead")
    out.add_argument("--report", metavar="FILE", help="write a self-contained HTML page")
    out.add_argument("--json", metavar="FILE", help="write the result for programs; - for stdout")
    out.add_argument(
        "--mlflow", metavar="EXPERIMENT", help="log the result to MLflow (MLFLOW_TRACKING_URI, or ./mlflow.db)"
    )
    out.add_argument("--quiet", action="store_true", help="no progress")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given, begun = list(sys.argv[1:] if arguments is None else arguments), time.monotonic()
    _prepare_streams()
    if given[:1] == ["study"]:
        return _study(given[1:])
    args = parser().parse_args(given, argparse.Namespace(begun=begun))
    if args.version:
        from manyfold import __version__

        print(__version__)
        return 0
    if args.command is None:
        parser().print_help()
        return BAD_INPUT
    try:
        with _own_stdout() as args.out:
            return {"evaluate": _evaluate, "check": _check, "gate": _gate}[args.command](args, given)
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())
        if getattr(error, "errno", None) == errno.ENOSPC:
            said += ", expected room: make some and call it again (a store keeps the episodes that were run)"
    except KeyboardInterrupt:
        print(f"manyfold {args.command}: interrupted before anything was known", file=sys.stderr)
        return 130
    except Exception as error:  # Python's own exit code, 1, would say of a gate that the candidate is worse
        at = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())} ({at.filename}:{at.lineno}), expected none; "
        said += "if it isn't code of your own, please report it"
    print(f"manyfold {args.command}: {said}", file=sys.stderr)
    return BAD_INPUT


def _prepare_streams() -> None:
    """A name that a terminal can't show is no reason to lose a result, and neither is a closed stderr."""
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Where results go; what environments print meanwhile, also from C and in other processes, goes to stderr."""
    out, before = sys.stdout, -1
    with contextlib.suppress(OSError, AttributeError, ValueError):  # closed, or none
        before = os.dup(1)
        if out.fileno() == 1:
            out = os.fdopen(os.dup(1), "w", encoding=out.encoding, errors="backslashreplace")
        sys.stdout.flush()
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        with contextlib.suppress(OSError):  # said already, where it is any news
            if out is not sys.stdout:
                out.close()
        if before >= 0:
            os.dup2(before, 1)
            os.close(before)


def _say(text: object, where: TextIO) -> None:
    """Whoever has stopped reading (`| head`) changes neither files nor the exit code."""
    try:
        print(text, file=where, flush=True)
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), where.fileno())  # what is buffered goes there


def _environment(args: argparse.Namespace) -> Any:
    from manyfold import envs

    try:
        kwargs = json.loads(args.env_kwargs) if args.env_kwargs else {}
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--env-kwargs is {args.env_kwargs!r:.60}, expected JSON such as '{{\"mode\": 1}}'")
    if own := kwargs.keys() & {"env", "horizon"}:
        raise ValueError(
            f"--env-kwargs has {own.pop()!r}, expected --env and --horizon beside it, or a function of yours"
        )
    sys.path.insert(0, os.getcwd())  # a user's own module beside the checkpoints
    return envs.make(args.env, args.horizon, **kwargs)


def _load(args: argparse.Namespace, paths: Sequence[str | Path]) -> Any:
    import torch

    from manyfold.policies.loading import load_policies

    torch.set_num_threads(1)  # the networks are small: more threads make them slower
    return load_policies(paths, greedy=args.greedy, epsilon=args.epsilon, activation=args.activation, trust=args.trust)


def _prepare(args: argparse.Namespace) -> None:
    """Before anything is loaded: can all that is asked for be written? Worker processes begin meanwhile."""
    for path in (args.report, args.json):
        _check_writable(path)
    if args.report is not None and args.report == args.json:
        raise ValueError(f"--report and --json are both {args.report!r}, expected two files")
    args.workers = args.workers or processes.cores()
    if args.workers > 1 and not args.dask:
        processes.context()


def _tracker(args: argparse.Namespace) -> Callable[..., str] | None:
    """Who logs to MLflow, if that is asked for."""
    if args.mlflow is None:
        return None
    from manyfold.tracking import Experiment

    return Experiment(args.mlflow).log


def _run(
    args: argparse.Namespace,
    given: Sequence[str],
    policies: Any,
    more: Callable[[Any], dict[str, Any]] = lambda result: {},
) -> Any:
    """Evaluates and writes what was asked for; the result. `more` is what the JSON says beside it."""
    from manyfold.door import evaluate

    env, log = _environment(args), _tracker(args)
    asked = {"stop": args.stop, "precision": args.precision}
    result = evaluate(
        env,
        policies,
        args.budget if args.episodes is None else args.episodes,
        args.seed,
        **asked,
        alpha=args.alpha,
        data=args.data,
        store=args.store,
        workers=args.workers,
        dask=args.dask,
        progress=_progress(args.quiet),
    )
    seconds = time.monotonic() - args.begun
    if sys.stderr.isatty() and not args.quiet:
        print("\r\033[K", end="", file=sys.stderr)
    about = {"environment": env.name, "policies": policies.how, "seed": args.seed}
    about |= {name: getattr(args, name) for name in ("data", "store") if getattr(args, name)}
    about["command"] = shlex.join(["manyfold", *given])
    _write(result, args, about, seconds, more(result))
    if log:
        print(f"MLflow has it as run {log(result, about, {'seconds': seconds}, args.report)}", file=sys.stderr)
    return result


def _write(result: Any, args: argparse.Namespace, about: dict[str, Any], seconds: float, more: dict[str, Any]) -> None:
    """The table, and what else was asked for: files first, as nobody may read stdout; it in any case."""
    from manyfold.files import write_text

    said = {**about, "how": about["policies"], "horizon": args.horizon, **result.summary(), "seconds": seconds, **more}
    text, page = json.dumps(said, indent=2, allow_nan=False), None
    try:
        if args.json not in (None, "-"):
            write_text(Path(args.json), text + "\n")
        if args.report is not None:
            page = result.report(args.report, seconds=seconds, **about)
    finally:
        _say(text if args.json == "-" else result, args.out)
    if page is not None:
        _say(f"the page is {page}", sys.stderr)


def _check_writable(path: str | None) -> None:
    """Before an episode is run, not after."""
    if path in (None, "-"):
        return
    folder = Path(str(path)).absolute().parent
    try:
        if Path(str(path)).is_dir():
            raise IsADirectoryError
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        raise ValueError(
            f"{path!r} can't be written, expected a file in a folder that exists and may be written"
        ) from None


def _progress(quiet: bool) -> Callable[[Any], None]:
    """A line on stderr: in place on a terminal, a new one every few seconds elsewhere."""
    live, last = sys.stderr.isatty(), 0.0

    def show(what: Any) -> None:
        nonlocal last
        now = time.monotonic()
        if quiet or now - last < (0.1 if live else 5.0):
            return
        last = now
        print(f"\r\033[K{what}" if live else what, end="" if live else "\n", file=sys.stderr, flush=True)

    return show


def _evaluate(args: argparse.Namespace, given: Sequence[str]) -> int:
    growing = args.stop is not None or args.precision is not None
    if args.episodes is None and not growing:
        raise ValueError("nothing says when to stop, expected --episodes 200, --stop best or --precision 5")
    if args.episodes is not None and (growing or args.budget is not None):
        raise ValueError("--episodes is a fixed number, expected --budget beside --stop or --precision, or it alone")
    _prepare(args)
    _run(args, given, _load(args, args.policies))
    return 0


def _check(args: argparse.Namespace, given: Sequence[str]) -> int:
    from manyfold.policies.checking import check

    findings = check(_environment(args), _load(args, args.policies), args.seed)
    for finding in findings:
        _say(finding, args.out)
    return 1 if any(finding.level in ("warning", "error") for finding in findings) else 0


def _gate(args: argparse.Namespace, given: Sequence[str]) -> int:
    _prepare(args)
    from manyfold.policies.importing import find_files

    files = [path for named in (args.baseline, args.candidate) for path in find_files(named)]
    if len(files) != 2 or files[0].samefile(files[1]):
        raise ValueError(f"{args.baseline} and {args.candidate}: {len(files)} files, expected two different ones")
    policies = _load(args, files)
    candidate = [one.path for one in policies.imported].index(files[1])  # they are sorted by name

    def verdict(result: Any) -> dict[str, Any]:
        code = UNKNOWN if result.best is None else BETTER if result.best == candidate else WORSE
        words = {UNKNOWN: "not told apart from", WORSE: "worse than", BETTER: "better than"}[code]
        pair, apart = (candidate, 1 - candidate), result.decision.difference
        low, high = (float(x) if math.isfinite(x) else None for x in (apart.low[pair], apart.high[pair]))
        value = float(result.mean[candidate] - result.mean[1 - candidate])
        difference = {"value": value, "low": low, "high": high}
        named = {"baseline": args.baseline, "candidate": args.candidate}
        return {"gate": {**named, "verdict": words, "difference": difference, "exit_code": code}}

    said = verdict(_run(args, given, policies, verdict))["gate"]
    sure = "" if said["exit_code"] == UNKNOWN else f", with {1 - args.alpha:g} confidence"
    where = sys.stderr if args.json == "-" else args.out
    apart = said["difference"]
    if apart["low"] is not None:
        sure += f"; the difference is {apart['value']:+.4g}, {apart['low']:+.4g} to {apart['high']:+.4g}"
    words = f"{args.candidate} is {said['verdict']} {args.baseline}{sure}"
    _say(f"gate: {words} (exit code {said['exit_code']})", where)
    return int(said["exit_code"])


def _study(arguments: Sequence[str]) -> int:
    """The pipeline's own command, which is there in a clone of the repository and isn't part of the library."""
    if not all(Path(name).is_file() for name in ("tasks/study.py", "params.yaml", "dvc.yaml")):
        print(
            f"manyfold study: {Path.cwd()} is no clone of manyfold's repository, expected one: git clone it, run `make "
            "setup`, and call this there",
            file=sys.stderr,
        )
        return BAD_INPUT
    return subprocess.run([sys.executable, "-m", "tasks.study", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
