"""`python -m benchmarks`: ratios in one file, whatever fails; and the table that is made of them."""

import importlib
import json
import typing

import yaml

from benchmarks import clusters, glance, install_size, policies
from benchmarks.__main__ import NAMES, RESULTS, ROOT, run
from manyfold.files import write_json


def test_ratios_are_collected_and_a_benchmark_that_fails_stops_no_other(tmp_path, capfd):
    results = tmp_path / "bench" / "bench.json"
    write_json(results, {"no_such": {"old": 1.0}, "other": {"kept": 2.0}})
    assert run(["no_such", "exact"], results) == ["no_such"]
    found = json.loads(results.read_text())
    assert set(found) == {"cores", "exact", "other"}
    assert found["other"] == {"kept": 2.0}
    assert 0 < found["exact"]["Gridworld 1,000, seconds"] < found["exact"]["Gridworld 27,000, seconds"]
    said = capfd.readouterr()
    assert "benchmarks.no_such failed with exit code 2; the others run on" in said.err
    assert "Exact oracle" in said.out  # its own table is printed, too
    assert list(results.parent.iterdir()) == [results]


def test_every_benchmark_returns_ratios():
    for name in NAMES:
        assert typing.get_type_hints(importlib.import_module(f"benchmarks.{name}").main)["return"] == dict[str, float]


def test_the_table_has_a_reason_exactly_where_the_ratio_is_below_5():
    found = {row.ratio[0]: {} for row in glance.ROWS}
    low = next(row for row in glance.ROWS if row.why)
    high = next(row for row in glance.ROWS if not row.why)
    found[low.ratio[0]][low.ratio[1]] = 4.994
    found[high.ratio[0]][high.ratio[1]] = 18.77
    lines = dict(zip(glance.ROWS, glance.rows(found), strict=True))
    assert lines[low][2] == "4.99"
    assert lines[low][-1] == low.why
    assert lines[high][2:4] == ("18.8", "-")
    assert lines[high][-1] == ""
    assert all(line[2] == "-" for row, line in lines.items() if row not in (low, high) and row.ratio != low.ratio)


def test_what_was_measured_is_what_the_table_and_dvc_ask_for():
    found = json.loads(RESULTS.read_text())
    assert {key[0] for row in glance.ROWS for key in (row.ratio, row.limit) if key} <= set(NAMES)
    measured = [line for line in glance.rows(found) if line[2] != "-"]
    assert len(measured) >= 6
    assert all(bool(line[-1]) == (float(line[2]) < 5) for line in measured)
    assert yaml.safe_load((ROOT / "dvc.yaml").read_text())["metrics"] == [str(RESULTS.relative_to(ROOT))]


def test_every_package_counts_once_and_for_the_first_extra_that_needs_it():
    sizes = install_size.sizes()
    every = [name for packages in sizes.values() for name in packages]
    assert len(every) == len(set(every))
    assert {"torch", "numpy"} <= set(sizes["core"])
    assert {"dvc", "mlflow", "dask", "distributed"} <= set(sizes["pipeline"])
    assert "onnxruntime" in sizes["onnx"]
    assert sizes["core"]["torch"] > 100


def test_the_cost_of_policies_is_that_of_the_worst_or_of_all_by_themselves():
    runs = [{"own": [1.0, 3.0], "pooled": [2.0, 5.0]}, {"own": [3.0, 3.0], "pooled": [4.0, 3.0]}]
    assert policies.cost("monte carlo", runs, 2.0) == 2.5  # each with as many episodes as it needs
    assert policies.cost("in turns", runs, 2.0) == 3.0
    assert policies.cost("pooled", runs, 2.0) == 2.0  # of the means 3 and 4
    for world in policies.WORLDS.values():
        for spread in policies.SPREADS:
            kept = world.kept(spread)
            assert len(set(kept)) == policies.MANY
            assert kept == sorted(kept)
    assert policies.chosen(2) == [0, 99]


def test_cores_take_the_next_shard_when_they_are_free():
    assert clusters.longest([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert clusters.longest([1.0, 1.0, 3.0], 2) == 4.0
