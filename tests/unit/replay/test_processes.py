import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from lmcache_histate.replay import processes
from lmcache_histate.replay.processes import ProcessScope, StartError, free_ports, wait_until_healthy

SHARED_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="Linux only")

# A child that starts a grandchild in a session of its own, tells its pid, and ignores SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_stubborn(scope, tmp_path):
    told = tmp_path / "grandchild"
    process = scope.start([sys.executable, "-c", STUBBORN, str(told)], tmp_path / "log")
    wait_for(lambda: told.exists() and told.read_text())
    return process, int(told.read_text())


def test_leaving_a_scope_ends_descendants_that_moved_away_and_ignore_sigterm(tmp_path):
    with ProcessScope(grace_s=0.3) as scope:
        process, grandchild = start_stubborn(scope, tmp_path)
        assert {process.pid, grandchild} <= scope.pids()
    assert process.poll() is not None
    assert not alive(grandchild)


def test_an_exception_ends_them_too(tmp_path):
    started = []

    def run():
        with ProcessScope(grace_s=0.3) as scope:
            started.extend(start_stubborn(scope, tmp_path))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    process, grandchild = started
    assert process.poll() is not None
    assert not alive(grandchild)


def test_scopes_do_not_touch_each_other(tmp_path):
    with ProcessScope(grace_s=0.3) as outer:
        process = outer.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
        with ProcessScope(grace_s=0.3) as inner:
            assert process.pid not in inner.pids()
        assert process.poll() is None


def test_shared_memory_of_ended_processes_goes_and_that_of_others_stays(tmp_path):
    stranger = SHARED_MEMORY / f"lmcache_kv_{os.getpid()}_9999"
    stranger.write_bytes(b"x")
    try:
        with ProcessScope(grace_s=0.3) as scope:
            process = scope.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
            left = SHARED_MEMORY / f"lmcache_kv_{process.pid}_0"
            left.write_bytes(b"x")
        assert not left.exists()
        assert stranger.exists()
    finally:
        stranger.unlink()


def test_a_process_that_renames_itself_is_still_found(tmp_path):
    pytest.importorskip("setproctitle")
    program = "import setproctitle, time; setproctitle.setproctitle('worker ' * 200); time.sleep(60)"
    with ProcessScope(grace_s=0.3) as scope:
        process = scope.start([sys.executable, "-c", program], tmp_path / "log")
        wait_for(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"worker"))
        assert process.pid in scope.pids()


def test_segments_that_workers_share_go_with_the_last_of_them(tmp_path):
    name = f"vllm_dist_{os.urandom(8).hex()}-tp:0-[0-1]-cpushm_0"
    (SHARED_MEMORY / name).write_bytes(bytes(4096))
    ready = tmp_path / "ready"
    program = (
        "import mmap, pathlib, sys, time\n"
        f"file = open('/dev/shm/{name}', 'r+b'); memory = mmap.mmap(file.fileno(), 0)\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    with ProcessScope(grace_s=0.3) as scope:
        first, second = (
            scope.start([sys.executable, "-c", program, f"{ready}{number}"], tmp_path / "log") for number in range(2)
        )
        wait_for(lambda: Path(f"{ready}0").exists() and Path(f"{ready}1").exists())
        scope.stop(first)
        assert (SHARED_MEMORY / name).exists()
        scope.stop(second)
        assert not (SHARED_MEMORY / name).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_unwinds_the_scope(tmp_path, number):
    program = f"""
import sys, time
from pathlib import Path
from lmcache_histate.replay.processes import ProcessScope, unwinding_on_signals
with unwinding_on_signals(), ProcessScope(grace_s=0.3) as scope:
    child = scope.start([sys.executable, "-c", "import time; time.sleep(60)"], Path({str(tmp_path / "log")!r}))
    print(child.pid, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(20) != 0
    process.stdout.close()
    wait_for(lambda: not alive(child))


def test_children_die_with_a_parent_that_was_killed(tmp_path):
    program = f"""
import sys, time
from pathlib import Path
from lmcache_histate.replay.processes import ProcessScope
scope = ProcessScope()
print(scope.start([sys.executable, "-c", "import time; time.sleep(60)"], Path({str(tmp_path / "log")!r})).pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not alive(child))


def test_free_ports_are_distinct():
    assert len(set(free_ports(20))) == 20


def test_a_process_that_ends_instead_of_answering_is_reported_with_its_log(tmp_path):
    log = tmp_path / "log"
    url = f"http://127.0.0.1:{free_ports(1)[0]}/"
    with ProcessScope() as scope:
        process = scope.start([sys.executable, "-c", "import sys; sys.exit('no such model')"], log)
        with pytest.raises(StartError, match="no such model"):
            wait_until_healthy(process, url, log)


def test_a_process_that_never_answers_is_given_up(tmp_path):
    log = tmp_path / "log"
    url = f"http://127.0.0.1:{free_ports(1)[0]}/"
    with ProcessScope(grace_s=0.3) as scope:
        process = scope.start([sys.executable, "-c", "import time; time.sleep(60)"], log)
        with pytest.raises(StartError, match="did not answer within"):
            wait_until_healthy(process, url, log, timeout_s=0.3)


def test_health_is_asked_without_the_proxy_of_the_environment(tmp_path, monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "healthy"}')

        def log_message(self, *arguments):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with ProcessScope(grace_s=0.3) as scope:
            process = scope.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
            wait_until_healthy(process, f"http://127.0.0.1:{server.server_port}/", tmp_path / "log", timeout_s=5)
    finally:
        server.shutdown()
        server.server_close()


def test_children_do_not_inherit_a_cache_configuration(monkeypatch):
    monkeypatch.setenv("LMCACHE_CONFIG", "histate")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = processes.child_environment({"OMP_NUM_THREADS": "1"})
    assert "LMCACHE_CONFIG" not in environment
    assert environment["PYTHONPYCACHEPREFIX"]
    assert environment["OMP_NUM_THREADS"] == "1"
    assert processes.child_environment({"LMCACHE_CONFIG": "x.yaml"})["LMCACHE_CONFIG"] == "x.yaml"
