"""The report as a user makes it: files in, a page, plots and numbers out."""

import re
from html.parser import HTMLParser

import msgspec
import pytest
from typer.testing import CliRunner

from lmcache_histate.cli.main import app
from lmcache_histate.cli.report_command import result_files
from lmcache_histate.replay.comparison import CACHED_TOKENS_REPORTED, CAPACITY_FACTOR
from lmcache_histate.replay.results import EvictionCount, RequestResult, Run, RunFacts, TierSample, write_run

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

GIB = 1 << 30
PLOTS = ("ttft-cdf", "ttft", "ttft-sensitive", "recomputed")


def a_run(policy, factor=1.0, live=False, hits=60, slow=1.0, settings=None, trace="<trace> & co", detail=True):
    requests = [
        RequestResult(
            f"s{index % 4}", f"s{index % 4}", index * 1.0, slow * (0.1 + index / 50), slow + 1, 1000, 10,
            hits * 10 if index % 3 else 800, 800, recomputed_kv_gone=0 if not index % 3 else 800 - hits * 10,
        )
        for index in range(24)
    ]  # fmt: skip
    samples = [
        TierSample(t * 10.0, {"gpu": 1.0 * GIB, "cpu": t * 0.1 * GIB}, {"disk": t * 0.2 * GIB}) for t in range(5)
    ]
    facts = RunFacts(
        policy,
        trace,
        not live,
        0,
        {} if factor is None else {"gpu": GIB, "cpu": factor * GIB, "disk": factor * GIB},
        (settings or {}) | ({CAPACITY_FACTOR: factor} if factor else {}),
        100.0,
        samples if detail else [],
        [EvictionCount("disk", "snapshot", 10, GIB, 4)] if detail else [],
    )
    return Run(facts, requests)


def report(tmp_path, *runs, options=()):
    folder = tmp_path / "runs"
    folder.mkdir(exist_ok=True)
    for number, run in enumerate(runs):
        write_run(folder / f"{number}.jsonl.gz", run)
    result = CliRunner().invoke(app, ["report", str(folder), "--output", str(tmp_path / "report"), *options])
    return result, tmp_path / "report"


class Tags(HTMLParser):
    """Open tags, and every address that the page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.count = [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_a_sweep_becomes_one_page_that_needs_nothing_else(tmp_path):
    runs = [
        a_run(policy, factor, hits=hits, slow=slow, detail=factor == 1.0)
        for factor in (0.5, 1.0)
        for policy, hits, slow in (("histate", 75, 0.5), ("cpu-disk", 60, 1.0))
    ]
    result, folder = report(tmp_path, *runs)
    assert result.exit_code == 0, result.output
    assert "0.50x cpu-disk" in result.output
    text = (folder / "index.html").read_text()
    tags = Tags(text)
    assert tags.open == []
    assert all(address.startswith(("data:", "#")) for address in tags.addresses)
    assert "<trace>" not in text
    assert "&lt;trace&gt; &amp; co" in text
    assert tags.count["details"] == 3  # two capacities, the settings
    names = {path.name for path in (folder / "figures").iterdir()}
    kinds = ["capacity", *(f"{factor}-{kind}" for factor in ("0.5x", "1x") for kind in PLOTS)]
    kinds += ["1x-evictions", "1x-occupancy"]
    assert names == {f"trace-co-{kind}.png" for kind in kinds}
    assert tags.count["img"] == len(names)
    assert all((folder / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert (folder / "summary.csv").read_text().count("\n") == 1 + 2 * 2 * 2
    assert (folder / "summary.json").exists()


@pytest.mark.slow
def test_plots_of_an_earlier_report_do_not_stay(tmp_path):
    report(tmp_path, a_run("histate", 0.5, detail=False))
    _, folder = report(tmp_path, a_run("histate", 1.0, detail=False))
    assert list((folder / "figures").glob("*-1x-*"))
    assert not list((folder / "figures").glob("*0.5x*"))


def test_one_run_alone_makes_a_report(tmp_path):
    result, folder = report(tmp_path, a_run("vllm", None, detail=False))
    assert result.exit_code == 0, result.output
    text = (folder / "index.html").read_text()
    assert "no request is reuse-sensitive" in text
    assert {path.name.rsplit("known-", 1)[1] for path in (folder / "figures").iterdir()} == {
        "ttft-cdf.png",
        "ttft.png",
        "recomputed.png",
    }


def test_live_runs_stand_beside_simulated_ones(tmp_path):
    live = a_run("histate", 1.0, live=True, settings={CACHED_TOKENS_REPORTED: False}, detail=False)
    result, folder = report(tmp_path, a_run("histate"), a_run("cpu-disk"), live)
    assert result.exit_code == 0, result.output
    text = (folder / "index.html").read_text()
    assert "histate (live)" in text
    assert "--enable-prompt-tokens-details" in text
    assert "2 simulated and 1 live run" in text


@pytest.mark.slow
def test_seeds_that_differ_and_failed_requests_are_said(tmp_path):
    failed = a_run("histate", live=True)
    broken = Run(failed.facts, [*failed.requests, RequestResult("s", "s", 0, 0, 0, 0, 0, 0, 0, error="gone")])
    other = a_run("cpu-disk")
    other = Run(msgspec.structs.replace(other.facts, seed=7), other.requests)
    _, folder = report(tmp_path, a_run("histate"), other, broken)
    text = (folder / "index.html").read_text()
    assert "not every policy has the same seeds" in text
    assert re.search(r"histate \(live\): 1 request", text)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"not json\n", "line 1: not a HiState result"), (b'{"policy":"a"}\n', "missing required field")],
)
def test_a_file_that_is_no_result_is_named(tmp_path, content, message):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 2
    assert "x.jsonl" in result.output
    assert message in result.output


def test_nothing_to_report_and_unknown_policies_are_errors(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, "no result files" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "missing")])
    assert (result.exit_code, "no such file or folder" in result.output) == (2, True)
    result, _ = report(tmp_path, a_run("histate"), options=("--policies", "marconi"))
    assert (result.exit_code, "no run of marconi; there are histate" in result.output) == (2, True)


def test_folders_that_a_sweep_set_aside_are_left_out(tmp_path):
    (tmp_path / ".old-x").mkdir()
    for name in (".old-x/a.jsonl.gz", "b.jsonl.gz", ".c.jsonl.gz.partial", "d.json"):
        (tmp_path / name).touch()
    assert result_files([tmp_path]) == [tmp_path / "b.jsonl.gz"]
