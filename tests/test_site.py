"""The site: it builds without a warning, needs no network and no server, and its reference says what the code says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import manyfold as mf
from tests import browser
from tests.pages import pooled, stopped

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages; strict, so that a link or an anchor that leads nowhere ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def chromium():
    found = browser.Browser(browser.required())
    yield found
    found.close()


def pages(site):
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_page_of_docs_is_there(site):
    written = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    found = {path.relative_to(site) for path in pages(site)}
    assert written <= found
    extra = {
        "reference/api",
        "reference/commands",
        "reference/params",
        "readme",
        "CONTRIBUTING",
        "CHANGELOG",
        "examples/hopper",
    }
    assert {Path(f"{name}.html") for name in extra} <= found
    assert not list(site.rglob("*.py"))


def test_nothing_is_loaded_from_elsewhere(site):
    for path in (*pages(site), *site.rglob("*.css")):
        text = path.read_text()
        assert not re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//", text), path
        assert not re.findall(r"<link[^>]*\shref=\"(?:https?:)?//", text), path
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", text), path


def test_pages_open_as_files_without_network_complaints_or_overflow(site, chromium):
    for path in pages(site):
        chromium.open(path, width=390, height=800)
        assert chromium.ask("document.querySelectorAll('h1').length") >= 1, path
        assert all(url.startswith("file:") for url in chromium.requests), path
        assert not chromium.complaints, path
        assert chromium.ask("document.documentElement.scrollWidth") <= 390, path
        broken = "[...document.images].filter(x => !x.naturalWidth).length"
        assert chromium.ask(broken) == 0, path


def test_search_needs_no_server(site, chromium):
    chromium.open(site / "search.html")
    asked = """new Promise(done => {
      const field = document.getElementById("mkdocs-search-query");
      field.value = "normaliser beside";
      const look = () => {
        field.dispatchEvent(new Event("input"));
        const found = [...document.querySelectorAll("#mkdocs-search-results a")].map(x => x.href);
        found.length ? done(found) : setTimeout(look, 20);
      };
      look();
    })"""
    answer = chromium.call("Runtime.evaluate", expression=asked, awaitPromise=True, returnByValue=True)
    first, *_ = answer["result"]["value"]
    assert first == f"{(site / 'howto' / 'policies.html').as_uri()}#normalisers"


def test_the_reference_has_every_public_name_and_option(site):
    api = (site / "reference" / "api.html").read_text()
    assert not [name for name in mf.__all__ if name != "__version__" and f"<code>mf.{name}</code>" not in api]
    commands = (site / "reference" / "commands.html").read_text()
    for option in ("--policies", "--candidate", "--title", "--precision", "--dask"):
        assert option in commands
    for name in ("evaluate", "check", "gate", "study new"):
        assert f">manyfold {name}</h2>" in commands


# --- docs/reference/files.md says what is written ---------------------------------------------------------------------

FILES = (ROOT / "docs" / "reference" / "files.md").read_text()


def documented(heading):
    """What stands in `code` under a heading."""
    section = re.search(rf"^## {heading}.*?(?=^## |\Z)", FILES, re.MULTILINE | re.DOTALL)[0]
    return set(re.findall(r"`(\w+)`", section))


def test_the_columns_of_logged_transitions_are_those_of_the_docs(tmp_path):
    about = mf.About("env", horizon=5, n_actions=2, width=1, seed=0)
    with mf.Writer(tmp_path / "x.parquet", about):
        pass
    schema = pq.read_schema(tmp_path / "x.parquet")
    expected = {*schema.names, *(key.decode() for key in schema.metadata)} - {"ARROW:schema"}
    assert expected <= documented("Logged transitions")


@pytest.mark.parametrize("result", [pooled(k=2, episodes=20), stopped(k=2, budget=40)], ids=["fixed", "stopped"])
def test_the_keys_of_a_result_are_those_of_the_docs(result):
    said = result.summary()
    assert {*said, *said["policies"][0]} <= documented("The result")


@pytest.mark.parametrize("name", ["metrics", "decisions"])
def test_the_keys_of_the_pipelines_files_are_those_of_the_docs(name):
    """`_se` and `_median` stand for the key before them with that ending."""
    known = documented(f"{name}.json")
    known |= {f"{key}{end}" for key in known for end in known if end.startswith("_")}
    for path in sorted((ROOT / "data" / "evaluate").glob(f"*/{name}.json")):
        found = json.loads(path.read_text())
        inner = {*found.get("final", {}), *(key for look in found.get("looks", [])[:1] for key in look)}
        assert {*found, *inner} <= known, path


def test_the_folders_of_a_store_are_those_of_the_docs(tmp_path):
    policies = mf.TabularPolicySet(np.full((2, 2, 4, 4), 0.25))  # [K, T, S, A]
    mf.evaluate(mf.Gridworld.draw(m=2, seed=0), policies, episodes=8, store=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "store.json",
        "policies",
        "plans",
        "episodes",
        "lock",
        "merging",
    }
