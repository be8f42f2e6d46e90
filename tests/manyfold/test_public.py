"""The public names: all there, all documented, and none costs anything before it is used."""

import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import manyfold


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", manyfold.__all__)
def test_every_public_name_resolves(name):
    assert getattr(manyfold, name) is not None


def test_names_are_listed_once_and_by_dir():
    assert len(manyfold.__all__) == len(set(manyfold.__all__))
    assert dir(manyfold) == sorted(manyfold.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", manyfold.__version__)
    with pytest.raises(AttributeError, match="module 'manyfold' has no attribute 'nonsense'"):
        _ = manyfold.nonsense


def test_the_docstring_names_every_public_name_and_no_other():
    (listed,) = re.findall(r"without notice\):\n\n(.*)\n\nNames are imported", manyfold.__doc__, re.S)
    words = set(re.findall(r"\w+", listed))
    assert set(manyfold.__all__) - words == {"__version__"}
    capitals = {word for word in words if re.match(r"[A-Z]\w*[a-z_]\w*[A-Z]|[A-Z_]{4,}$", word)}  # CamelCase, CAPITALS
    assert capitals <= set(manyfold.__all__)


def test_every_public_name_has_a_docstring():
    for name in manyfold.__all__:
        x = getattr(manyfold, name)
        if isinstance(x, type | types.FunctionType | types.ModuleType):
            assert x.__doc__, name
            assert not x.__doc__.startswith(f"{name}("), name  # a dataclass's own


def test_an_import_alone_loads_nothing_heavy():
    heavy = ("torch", "envpool", "mujoco", "pyarrow", "onnx", "scipy.stats", "matplotlib", "manyfold.envs")
    loaded = python(f"import sys, manyfold; print([name for name in {heavy} if name in sys.modules])")
    assert loaded == "[]"


def test_numpy_alone_is_enough_for_exact_values():
    heavy = ("torch", "envpool", "mujoco")
    loaded = python(f"import sys, manyfold.exact; print([x for x in {heavy} if x in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "from manyfold import exact; exact.values",
        "import manyfold.exact; manyfold.exact.values",
        "import manyfold; manyfold.exact.values",
        "from manyfold import similarity, estimators, rollout; similarity.eta, estimators.pdis, rollout.rollout",
        "import manyfold.rollout; manyfold.rollout.rollout",
        "from manyfold import *; Gridworld.draw(3, 0).mdp(); FitConfig(); load_policies; exact.values",
        "import manyfold as mf; mf.fit; mf.export; mf.fqe.engine; mf.fit.__call__; mf.export.__call__",
        "import manyfold.fqe, manyfold.design.export; manyfold.fit.__call__; manyfold.export.__call__",
    ],
)
def test_every_way_of_importing_works(code):
    python(code)


def test_the_version_is_that_of_the_package():
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert about["project"]["version"] == manyfold.__version__
