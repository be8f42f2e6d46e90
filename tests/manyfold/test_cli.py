"""The command, as people call it: what it prints and writes, its exit codes, and one line for whatever is wrong."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import manyfold as mf
from manyfold import cli, envs
from manyfold.cli import main
from tests import checkpoints, pages

ENV = "--env", "own:make"


@pytest.fixture
def run(place, zips, capfd):
    """Runs the command here; exit code, stdout and stderr."""

    def run(command, *arguments, code=0):
        capfd.readouterr()
        found = main([command, *map(str, arguments)])
        out, errors = capfd.readouterr()
        assert found == code, errors
        return out, errors

    return run


def evaluate(run, zips, *arguments, **more):
    return run("evaluate", *ENV, "--policies", zips, "--workers", 1, "--quiet", *arguments, **more)


def values(said):
    return {row["name"]: row["value"] for row in said["policies"]}


def test_table_json_and_page_say_what_evaluate_does(run, zips, place):
    """The same numbers to the last bit in the JSON, and to the last digit shown in the page."""
    out, errors = evaluate(run, zips, "--episodes", 60, "--seed", 3, "--json", "x.json", "--report", "x.html")
    assert out.splitlines()[0] == "own:make: 3 policies, stochastic; pooled evaluation"
    assert errors == "the page is x.html\n"
    said = json.loads((place / "x.json").read_text())
    found = mf.evaluate(envs.make("own:make"), mf.load_policies(zips), 60, 3)
    assert values(said) == dict(zip(found.names, found.mean.tolist(), strict=True))
    assert out == f"{found}\n"
    assert said["best"] == "a"
    assert shlex.split(said["command"])[:2] == ["manyfold", "evaluate"]
    header, *rows = pages.read(place / "x.html").table("What each policy is worth")
    for row, shown in zip(said["policies"], rows, strict=True):
        cells = dict(zip(header, shown, strict=True))
        assert cells["policy"] == row["name"]
        assert pages.number(cells["value"]) == pytest.approx(row["value"], abs=pages.rounding(cells["value"]))


def test_json_alone_on_stdout(run, zips):
    out, errors = evaluate(run, zips, "--episodes", 60, "--json", "-")
    assert values(json.loads(out)).keys() == {"a", "b", "c"}
    assert errors == ""


def test_json_is_alone_on_stdout_whatever_the_environment_prints(zips, place):
    """Also in other processes, and from C, as pybullet and pygame do."""
    (place / "own.py").write_text(checkpoints.OWN.replace("self.t = 0\n", "self.t = os.write(1, b'hello') and 0\n"))
    given = "--policies", str(zips), "--episodes", "220", "--json", "-", "--quiet"
    for workers in ("1", "2"):
        done = call("evaluate", *ENV, *given, "--workers", workers)
        assert json.loads(done.stdout)["episodes"] == 220
        assert done.stderr == "hello" * 220


def call(*arguments, **more):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "manyfold.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def test_a_terminal_that_lacks_a_letter_loses_no_result(zips, place):
    (place / "ü.zip").write_bytes((zips / "a.zip").read_bytes())
    given = "--policies", "ü.zip", "--episodes", "8", "--workers", "1", "--quiet"
    done = call("evaluate", *ENV, *given, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\xfc is worth" in done.stdout or r"\xfc  " in done.stdout


FULL = b"manyfold gate: [Errno 28] No space left on device, expected room: make some and call it again "
FULL += b"(a store keeps the episodes that were run)\n"


def test_files_are_there_when_nobody_reads_stdout(zips, place):
    """As `manyfold gate ... | true`: the verdict stays the exit code."""
    files = "--baseline", str(zips / "a.zip"), "--candidate", str(zips / "b.zip")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "manyfold.cli", "gate", *ENV, *files, "--workers", "1", "--json", "x.json"]
    done = subprocess.run([*command, "--quiet"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
    assert json.loads((place / "x.json").read_text())["gate"]["exit_code"] == 1
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*command, "--quiet"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, FULL)


def test_two_workers_and_a_dask_cluster_print_the_same(run, zips, place, dask_scheduler):
    """240 episodes are several shards however many run them."""
    given = "--env", "CartPole-v1", "--horizon", 10, "--episodes", 240  # the last --env counts
    alone, _ = evaluate(run, zips, *given)
    assert alone.startswith("CartPole-v1: 3 policies")
    assert evaluate(run, zips, *given, "--workers", 2)[0] == alone
    assert evaluate(run, zips, *given, "--dask", dask_scheduler)[0] == alone
    _, errors = evaluate(run, zips, "--episodes", 240, "--dask", dask_scheduler, code=2)
    line = r"a worker can't load the environment or a policy \(No module named 'own'\), expected its modules there"
    assert re.search(f"^manyfold evaluate: {line}$", errors, re.MULTILINE)


def test_greedy_is_said_and_another_policy(run, zips):
    out, _ = evaluate(run, zips, "--episodes", 60, "--greedy", "--json", "greedy.json")
    assert out.splitlines()[0].startswith("own:make: 3 policies, greedy;")
    said = json.loads(Path("greedy.json").read_text())
    assert values(said)["a"] == pytest.approx(checkpoints.T)  # always right
    assert values(said)["c"] == pytest.approx(checkpoints.T)


def test_logged_data_are_read_and_named(run, zips, place):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((101 * 5, 4)).astype(np.float32)
    actions = rng.integers(2, size=500)
    rows = np.arange(505).reshape(101, 5)[:, :-1]
    states, nexts = x[rows].reshape(-1, 4), x[rows + 1].reshape(-1, 4)
    t = np.tile(np.arange(4), 101)
    actions = rng.integers(2, size=len(t))
    rewards = (actions == (states[:, 2] + states[:, 3] > 0)).astype(float)
    columns = {"t": t, "episode": np.repeat(np.arange(101), 4), "action": actions, "reward": rewards}
    np.savez(place / "d.npz", state=states, next_state=nexts, terminated=np.zeros(len(t), bool), **columns)
    out, _ = evaluate(run, zips, "--episodes", 60, "--data", "d.npz")
    assert "d.npz: " in out
    assert "404 rows" in out


def test_json_says_all_that_the_table_does(run, zips):
    """And what was evaluated, and how, so that it can be repeated."""
    out, _ = evaluate(run, zips, "--episodes", 60, "--seed", 3, "--json", "x.json")
    said = json.loads(Path("x.json").read_text())
    assert (said["environment"], said["how"], said["seed"], said["alpha"]) == ("own:make", "stochastic", 3, 0.05)
    header, *rows = [re.split(r"\s{2,}", line) for line in out.splitlines()[1:5]]
    for row, one in zip(rows, said["policies"], strict=True):
        shown = dict(zip(header, row, strict=False))
        assert shown["policy"] == one["name"]
        assert float(shown["value"]) == pytest.approx(one["value"], rel=1e-3)
        assert float(shown["relative variance"]) == pytest.approx(one["relative_variance"], abs=1e-3)
        assert float(shown["effective episodes"]) == pytest.approx(one["effective_episodes"], abs=0.5)
        assert one["own_episodes"] == 20
        assert 0 < one["standard_error"] < one["half_width"]
    out, _ = evaluate(run, zips, "--stop", "best", "--json", "x.json")
    said = json.loads(Path("x.json").read_text())
    assert sum(one["own_episodes"] for one in said["policies"]) == said["episodes"]


def test_a_store_grows(run, zips):
    evaluate(run, zips, "--episodes", 60, "--store", "evals")
    out, _ = evaluate(run, zips, "--episodes", 60, "--store", "evals")
    assert out.splitlines()[0].endswith("; 60 stored episodes")
    assert "\n60 episodes, 300 steps." in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--stop", "best", "--alpha", "0.01"], "Stopped: the best policy is known."),
        (["--stop", "order", "--budget", "12"], "The budget of 12 episodes is spent."),
        (["--precision", "0.8"], "Stopped: every value is known to +- 0.8."),
    ],
)
def test_stopping(run, zips, arguments, reason):
    out, _ = evaluate(run, zips, *arguments, "--json", "x.json")
    assert reason in out
    said = json.loads(Path("x.json").read_text())
    assert said["alpha"] == (0.01 if "--alpha" in arguments else 0.05)
    assert said["reason"] == reason
    if "--precision" in arguments:
        assert max(row["half_width"] for row in said["policies"]) <= 0.8
    if "--budget" in arguments:
        assert said["episodes"] <= 12


def test_progress(run, zips):
    _, errors = run("evaluate", *ENV, "--policies", zips, "--workers", 1, "--episodes", 60)
    assert errors == "60 of 60 episodes\n"


def gate(run, zips, baseline, candidate, code, *arguments, env=ENV):
    files = "--baseline", zips / baseline, "--candidate", zips / candidate
    return run("gate", *env, *files, "--workers", 1, "--quiet", *arguments, code=code)


@pytest.mark.parametrize(("baseline", "candidate", "code"), [("b.zip", "a.zip", 0), ("a.zip", "b.zip", 1)])
def test_gate(run, zips, baseline, candidate, code):
    """a.zip is better than b.zip, whichever of them is the candidate; files are sorted by their names inside."""
    out, errors = gate(run, zips, baseline, candidate, code)
    word = "worse" if code else "better"
    files = f"{zips / candidate} is {word} than {zips / baseline}"
    line = (
        rf"gate: {re.escape(files)}, with 0.95 confidence; the difference is (\S+), (\S+) to (\S+) \(exit code {code}\)"
    )
    value, low, high = map(float, re.fullmatch(line, out.splitlines()[-1]).groups())
    assert low < value < high
    assert high < 0 if code else low > 0
    out, errors = gate(run, zips, baseline, candidate, code, "--json", "-")
    said = json.loads(out)
    assert said["best"] == "a"
    assert (said["gate"]["verdict"], said["gate"]["exit_code"]) == (f"{word} than", code)
    difference = said["gate"]["difference"]
    by_name = {one["name"]: one["value"] for one in said["policies"]}
    assert difference["value"] == pytest.approx((by_name["b"] - by_name["a"]) * (1 if code else -1))
    assert difference["low"] == pytest.approx(low, rel=1e-3)
    assert errors.startswith("gate: ")


def test_gate_that_can_not_tell(run, zips, tmp_path):
    (tmp_path / "copy.zip").write_bytes((zips / "a.zip").read_bytes())
    out, _ = gate(run, zips, "a.zip", tmp_path / "copy.zip", 3, "--budget", 40)
    assert f"copy.zip is not told apart from {zips / 'a.zip'}" in out.splitlines()[-1]
    assert out.endswith(" (exit code 3)\n")


def test_gate_takes_patterns_and_wants_two_files(run, zips, tmp_path):
    gate(run, zips, "[b]*.zip", "[a]*.zip", 0)
    for baseline, files in (("a.zip", 2), ("*.zip", 4), (tmp_path / "link.zip", 2)):
        if baseline == tmp_path / "link.zip":
            baseline.symlink_to(zips / "a.zip")
        _, errors = gate(run, zips, baseline, "a.zip", 2)
        assert errors.endswith(f": {files} files, expected two different ones\n")


def test_check(run, zips):
    out, errors = run("check", *ENV, "--policies", zips)
    assert out.splitlines()[-1].startswith("ok: ")
    assert errors == ""
    out, _ = run("check", "--env", "Acrobot-v1", "--policies", zips, code=1)
    assert out.splitlines()[0].startswith("error: ")


def test_help_of_every_option():
    every = cli.parser()
    (commands,) = (x for x in every._actions if isinstance(x, argparse._SubParsersAction))
    assert set(commands.choices) == {"evaluate", "check", "gate", "study"}  # the last has a parser of its own
    for name, one in commands.choices.items():
        if name == "study":
            continue
        text = one.format_help()
        for action in one._actions:
            assert len(action.help or "") > 8, (name, action.option_strings)
            assert action.option_strings[-1] in text
        assert len(one.description.splitlines()) > 1


def test_examples_of_the_help_parse():
    text = f"{cli.__doc__}\n{cli.EVALUATE}"
    examples = re.findall(r"^ *manyfold (?!study)(.*)$", text, re.MULTILINE)
    assert len(examples) == 6
    for example in examples:
        cli.parser().parse_args(shlex.split(example))


GOOD = {"--env": ["own:make"], "--policies": ["{zips}"], "--episodes": ["12"], "--workers": ["1"]}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"--policies": ["none/*.zip"]}, r"none/\*\.zip: no files match, expected policies \(\.zip, .*folder is "),
        ({"--policies": [""]}, "'': no files match, expected policies"),
        ({"--policies": ["{zips}/a.zip", "wide.zip"]}, "files of two environments: .*; expected one environment"),
        ({"--policies": ["text.zip"]}, r"text\.zip: not a zip, expected a policy"),
        ({"--policies": ["other.zip"]}, r"other\.zip: a zip of own\.py, expected a policy"),
        ({"--policies": ["nan.zip"]}, r"nan\.zip: .*NaN or infinity, expected finite"),
        ({"--policies": ["huge.zip"]}, "huge gave NaN or infinity, expected"),
        ({"--env": ["NoSuch-v1"]}, "environment 'NoSuch-v1': .* doesn't exist.* Expected a Gymnasium id, or module"),
        ({"--env": ["nowhere:make"]}, "environment 'nowhere:make': No module named 'nowhere'; is the module in"),
        ({"--env": ["own:nothing"]}, "environment 'own:nothing': own has no function nothing, expected one that"),
        ({"--env": ["wrong:make"]}, r"environment 'wrong:make': importing 'wrong' failed \(SyntaxError: .*, expected"),
        ({"--env": ["own:two"]}, r"own:two: made 2, expected a gymnasium\.Env"),
        ({"--env": ["own:endless"]}, "own:endless has no TimeLimit, expected a horizon"),
        ({"--env": ["own:crashing"], "--env-kwargs": ['{"at": 1}']}, "own:crashing: step 1 .*diverged.* to run"),
        ({"--env-kwargs": ["{"]}, "--env-kwargs is '{', expected JSON"),
        ({"--env-kwargs": ['{"horizon": 9}']}, "--env-kwargs has 'horizon', expected --env and --horizon beside it"),
        (
            {"--env": ["CartPole-v1"], "--env-kwargs": ['{"name": 9}']},
            "environment 'CartPole-v1': name can't be passed on to it, expected other arguments",
        ),
        ({"--report": ["x"], "--json": ["x"]}, "--report and --json are both 'x', expected two files"),
        ({"--env-kwargs": ["[1]"]}, r"--env-kwargs is '\[1\]', expected JSON"),
        ({"--env-kwargs": ['{"no": 1}']}, r"own:make: making it failed .*unexpected keyword argument 'no'"),
        ({"--env": ["Acrobot-v1"]}, "the policies take observations of 4 numbers, those of Acrobot-v1 have 6"),
        ({"--horizon": ["0"]}, "horizon is 0, expected a whole number from 1"),
        ({"--alpha": ["2"]}, "alpha is 2.0, expected the probability"),
        ({"--epsilon": ["2"]}, "epsilon is 2.0, expected a number from 0 to 1"),
        ({"--episodes": ["1"]}, "episodes is 1, expected a whole number of at least 6"),
        ({"--episodes": ["0"]}, "episodes is 0, expected a whole number of at least 6"),
        ({"--episodes": []}, "nothing says when to stop, expected --episodes 200, --stop best or --precision 5"),
        ({"--budget": ["20"]}, "--episodes is a fixed number, expected --budget beside"),
        ({"--stop": ["best"]}, "--episodes is a fixed number, expected --budget beside"),
        ({"--episodes": [], "--precision": ["0"]}, "precision is 0.0, expected half the width"),
        ({"--episodes": [], "--stop": ["best"], "--budget": ["1"]}, "budget is 1, expected a whole number of at least"),
        ({"--workers": ["-1"]}, "workers is -1, expected a whole number from 1"),
        ({"--json": ["none/x.json"]}, "'none/x.json' can't be written, expected a file in a folder that exists"),
        ({"--report": ["none/x.html"]}, "'none/x.html' can't be written, expected a file in a folder that exists"),
        ({"--report": ["/proc/x.html"]}, "'/proc/x.html' can't be written, expected"),
        ({"--report": ["."]}, r"'\.' can't be written, expected"),
        ({"--data": ["none.npz"]}, r"none\.npz: no such file or folder, expected logged data"),
        ({"--store": ["own.py"]}, r"own\.py: a file, expected a folder for the store"),
        ({"--store": ["/proc/evals"]}, "/proc/evals: cannot be made .*, expected a folder for the store"),
        ({"--store": ["."]}, r"\.: not a store and not empty, expected a new or empty folder"),
        (
            {"--store": ["old"]},
            r"old/store\.json: manyfold-store version 99, expected manyfold-store version 1; use another folder",
        ),
        ({"--store": ["elsewhere"]}, "elsewhere: a store of another environment: name .*; use another folder"),
        ({"--dask": ["nonsense"]}, r"nonsense: no Dask scheduler answers .*, expected tcp://host:port"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(run, zips, place, changed, line):
    prepare_bad(place, zips, changed)
    options = {"--json": ["x.json"], "--report": ["x.html"], **GOOD, **changed}
    given = [x.format(zips=zips) if "{zips}" in x else x for name, x in flat(options)]
    before = sorted(place.rglob("*"))
    out, errors = run("evaluate", *given, "--quiet", code=2)
    assert out == ""
    assert re.fullmatch(f"manyfold evaluate: {line}[^\n]*\n", errors), errors
    ours = [path for path in place.rglob("*") if path not in before and "mlflow" not in path.name]
    assert [path for path in ours if path.suffix != ".pyc" and path.name != "__pycache__"] == []


def flat(options):
    """Options and their arguments in a row; those without any are left out."""
    return [(name, x) for name, given in options.items() if given for x in (name, *given)]


def prepare_bad(place, zips, changed):
    """Only what the case needs."""
    named = {x for given in changed.values() for x in given}
    if "wide.zip" in named:
        checkpoints.save(place / "wide.zip", 1.0, width=6)
    if "nan.zip" in named:
        checkpoints.save(place / "nan.zip", np.nan)
    if "huge.zip" in named:
        checkpoints.save(place / "huge.zip", 3e38)
    if "other.zip" in named:
        with zipfile.ZipFile(place / "other.zip", "w") as file:
            file.write(place / "own.py", "own.py")
    (place / "text.zip").write_text("text")
    (place / "wrong.py").write_text("def make(:")
    (place / "old").mkdir()
    (place / "elsewhere").mkdir()
    about = {"format": "manyfold-store", "version": 99, "environment": {"name": "Hopper-v5"}}
    (place / "old" / "store.json").write_text(json.dumps(about))
    (place / "elsewhere" / "store.json").write_text(json.dumps(about | {"version": 1}))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["evaluate"], "manyfold evaluate: the following arguments are required: --env, --policies; see .* --help"),
        (["gate", "--env", "x"], "manyfold gate: the following arguments are required: --baseline, --candidate; .*"),
        (["evaluate", "--episodes", "x"], "manyfold evaluate: argument --episodes: invalid int value: 'x'; see .*"),
        (["judge"], "manyfold: argument .*: invalid choice: 'judge' .*"),
        (["evaluate", "--env", "nowhere:make", "--policies", "own.py", "--episodes", "9"], "manyfold evaluate: own.*"),
        (
            [*("evaluate", "--env", "own:make", "--policies", "{zips}", "--episodes", "9"), "--dask", "tcp://[::1"],
            r"manyfold evaluate: tcp://\[::1: no Dask scheduler answers .*",
        ),
    ],
)
def test_a_process_ends_with_one_line_and_exit_code_2(place, zips, arguments, line):
    """Also nothing that is printed while the process ends."""
    given = [x.format(zips=zips) for x in arguments]
    done = subprocess.run([sys.executable, "-m", "manyfold.cli", *given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"{line}\n", done.stderr), done.stderr


def test_no_command_shows_how(capsys):
    assert main([]) == 2
    assert "evaluate" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{mf.__version__}\n"
