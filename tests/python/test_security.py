"""Tokens and TLS of a connection: what is refused before a byte is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from stockpot import CheckpointHook, Client, ErrorCode, Security, StockpotError
from stockpot.connection import Address

TOKEN = "0123456789abcdef-token"


@pytest.mark.parametrize(("address", "local"), [
    ("127.0.0.1:1", True), ("127.8.0.1:1", True), ("localhost:1", True), ("[::1]:1", True),
    ("unix:/run/s", True), ("127.0.0.1.example.com:1", False), ("example.com:1", False),
    ("10.0.0.1:1", False), ("[::2]:1", False)])
def test_a_token_does_not_leave_the_machine_in_the_clear(address: str, local: bool) -> None:
    assert Address.parse(address).is_local() is local
    security = Security(token=TOKEN)
    if local:
        Client(address, security=security)
        return
    for make in (lambda: Client(address, security=security),
                 lambda: CheckpointHook(address, "r", "b", security=security)):
        with pytest.raises(StockpotError, match="TLS only") as raised:
            make()
        assert raised.value.code == ErrorCode.INVALID_ARGUMENT
        assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 5000, b"\xff" * 20, None])
def test_token_files_that_hold_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StockpotError, match="token file") as raised:
        Security.from_files(path)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f" {TOKEN} \nmore\n")
    monkeypatch.setenv("STOCKPOT_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("STOCKPOT_TLS_CA", "ca")
    assert Security.from_environment() == Security(token=TOKEN, ca_file="ca")
    assert TOKEN not in repr(Security.from_environment())
    with pytest.raises(StockpotError, match="TLS with ca"):
        Client("127.0.0.1:1")
