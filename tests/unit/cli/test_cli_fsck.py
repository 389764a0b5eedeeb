"""``histate fsck`` on a real folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_histate.cli.main import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fsck", *arguments])
    return result.exit_code, result.output


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    code, output = run(str(tmp_path))
    assert code == 2
    assert "holds no disk tier" in output


def test_damage_is_found_then_mended(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from lmcache_histate.backends.disk.record import NOWHERE, ObjectId
    from lmcache_histate.backends.disk.store import DiskStore, StoreConfig

    store = DiskStore(StoreConfig(root=tmp_path, capacity_bytes=64 << 20, min_free_bytes=0), lambda entries: None)
    namespace = store.namespace("model", (((4096,), "torch.uint8"),))
    for number in range(3):
        payload = torch.full((4096,), number, dtype=torch.uint8).numpy()
        dirty: set[str] = set()
        name = ObjectId("model", bytes([number]) * 32, 0, 0, "")
        store.put(namespace, name, memoryview(payload), NOWHERE, lambda: True, dirty)
        store.sync(dirty)
    store.close()
    assert run(str(tmp_path))[0] == 0
    record = sorted(tmp_path.rglob("*.hsr"))[0]
    data = bytearray(record.read_bytes())
    data[5000] ^= 0xFF
    record.write_bytes(bytes(data))
    code, output = run(str(tmp_path))
    assert code == 1
    assert "damaged record" in output
    assert run("--repair", str(tmp_path))[0] == 0
    assert not record.exists()
    assert run(str(tmp_path))[0] == 0
