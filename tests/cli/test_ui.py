"""`triplane ui` refuses early what would fail late or do harm."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from triplane_dagster.cli.ui import alone, require_free


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(Address already in use\): choose another"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid:3000 \(Name or service not known\)"):
        require_free("no-such-host.invalid", 3000)


def test_one_instance_has_one_ui(tmp_path: Path) -> None:
    with alone(tmp_path / "home"):
        with pytest.raises(ConfigError, match=r"already running for .*home"), alone(tmp_path / "home"):
            raise AssertionError("two at once")
    with alone(tmp_path / "home"):
        pass
