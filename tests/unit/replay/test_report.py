import io
import json
import math

import pytest
from rich.console import Console

from lmcache_histate.replay import report
from lmcache_histate.replay.outcome import RequestOutcome, RunOutcome, Verdict

TITLES = {"a": "Back end A", "b": "Back end B"}


def run(name, hit=60):
    requests = tuple(
        RequestOutcome(index, "s", kind, 100, 90, hit, 0.1 * (index + 1), 1.0, (1,))
        for index, kind in enumerate(("first", "append", "append", "rewind"))
    )
    return RunOutcome(name, requests, 1.0, 2.0)


def text(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


def test_percentiles_are_nearest_rank():
    values = list(range(1, 101))
    assert report.percentile(values, 50) == 50
    assert report.percentile(values, 99) == 99
    assert report.percentile([7.0], 99) == 7.0
    assert math.isnan(report.percentile([], 50))


def test_summaries_add_up():
    summary = report.summarize(run("a").requests)
    assert (summary.requests, summary.prompt_tokens, summary.hit_tokens, summary.recomputed_tokens) == (
        4,
        400,
        240,
        120,
    )
    assert summary.hit_rate == pytest.approx(0.6)
    assert summary.mean_ttft_s == pytest.approx(0.25)


def test_the_main_table_names_every_back_end_and_its_wrong_outputs():
    verdicts = {"b": Verdict(equal=2, rounding=(1,), wrong=(3,), largest_difference=2.0)}
    shown = text(report.main_table([run("a"), run("b", hit=80)], TITLES, verdicts))
    assert "Back end A" in shown
    assert "ref." in shown
    row = next(line for line in shown.splitlines() if "Back end B" in line)
    assert row.split()[-9:] == ["B", "4", "400", "320", "40", "250", "200", "400", "1"]
    assert "…" not in shown


def test_the_kind_table_leaves_out_kinds_that_do_not_occur():
    shown = text(report.kind_table([run("a"), run("b")], TITLES))
    assert "rewind" in shown
    assert "fork" not in shown


def test_json_and_plot_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [run("a"), run("b", hit=80)]
    verdicts = {"b": Verdict(3, (), (3,), math.inf)}
    report.save_json(report.to_json(runs, verdicts, {"seed": 0}), tmp_path / "results.json")
    value = json.loads((tmp_path / "results.json").read_text())
    assert value["runs"][0]["summary"]["recomputed_tokens"] == 120
    assert value["runs"][0]["outputs"] is None
    assert value["runs"][1]["outputs"]["largest_difference_nats"] is None
    report.save_plot(runs, TITLES, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
