"""What the README shows is what the commands give."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_python_example_runs_and_estimates_every_policy():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    found, exact, mdp = names["found"], names["exact"], names["mdp"]
    assert (np.abs(found.mean - exact.values(mdp, names["policies"])) < 4 * found.standard_error).all()


def test_its_table_is_the_one_that_make_wrote():
    assert (ROOT / "data/demo/relative_variance.md").read_text().strip() in README


def test_the_functions_it_names_exist():
    import manyfold.estimators
    import manyfold.exact
    import manyfold.fqe
    import manyfold.gridworld
    import manyfold.similarity

    assert len(re.findall(r"!\[", README)) == len(
        [p for p in re.findall(r"!\[.*?\]\((.*?)\)", README) if (ROOT / p).exists()]
    )
    named = re.findall(r"`(exact|estimators|fqe|similarity|gridworld)\.(\w+)", README)
    assert len(named) > 15
    for module, function in named:
        assert hasattr(getattr(manyfold, module), function), f"{module}.{function}"
