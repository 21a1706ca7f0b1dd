"""The hook against servers that are dead, stalled or speak something else: training goes on."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from stockpot import CheckpointHook, Client, ErrorCode, StockpotError
from stockpot.connection import Address

from tests.daemon import free_port
from tests.python.conftest import poll

STEPS = 20


@pytest.fixture
def dead_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens; nobody answers unless the test does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def run_loop(hook: CheckpointHook, steps: int = STEPS) -> torch.nn.Module:
    """A real loop: a small model trains and is pushed at every step."""
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.on_step(step, model, {"loss": loss})
    return model


def test_dead_server(dead_address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="stockpot")
    hook = CheckpointHook(dead_address, run="r", base="b", every=1)
    run_loop(hook)
    poll(lambda: hook.stats.retries > 0, 20)
    stats = hook.stats
    assert stats.staged == 2  # as many as there are buffers
    assert stats.skipped == STEPS - 2
    assert stats.committed == 0
    assert "daemon at 127.0.0.1" in stats.last_error or "buffers" in stats.last_error
    assert not hook.close(timeout_s=0.1)
    poll(lambda: hook.stats.failed == 2, 20)  # dropped, and counted
    messages = [record.getMessage() for record in caplog.records]
    # Once each: the upload and the skipped saves; every one that was dropped.
    assert len(messages) == 4, messages
    assert not hook.on_step(STEPS + 1, torch.nn.Linear(1, 1))  # closed: ignored


def test_a_save_is_given_up_after_the_retry_time(dead_address: str) -> None:
    with CheckpointHook(dead_address, run="r", base="b", every=1, retry_for_s=0.6) as hook:
        assert hook.on_step(1, {"x": torch.ones(3)})
        assert hook.flush(30)
        assert hook.stats.failed == 1 and hook.stats.retries >= 1


def test_c10_a_stalled_server_does_not_stall_training(listener: socket.socket) -> None:
    hook = CheckpointHook(address_of(listener), run="r", base="b", every=1)
    start = time.monotonic()
    run_loop(hook)
    stalled_s = time.monotonic() - start
    assert hook.stats.staged == 2 and hook.stats.skipped == STEPS - 2
    assert not hook.flush(0.2)
    assert not hook.close(0.2)
    # The connection's time-out is 120 s; no step may have seen any of it.
    assert stalled_s < 10


def test_wait_policy_is_bounded(dead_address: str) -> None:
    hook = CheckpointHook(dead_address, run="r", base="b", every=1, when_full="wait",
                          max_wait_s=0.3)
    tensors = {"x": torch.ones(3)}
    assert hook.on_step(1, tensors) and hook.on_step(2, tensors)
    start = time.monotonic()
    assert not hook.on_step(3, tensors)
    assert 0.3 <= time.monotonic() - start < 10
    hook.close(0.1)


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64, b"\xff" * 64,
    b"\x80\x01\x00\x02\x7f\xff\xff\xff", b"\x80\x01\x00\x02\x00\x00\x00\x05hello\x00\x00\x00\x00",
    b"",
], ids=["http", "zeros", "ones", "lying length", "half a message", "hang up"])
def test_a_server_that_speaks_otherwise(listener: socket.socket, answer: bytes) -> None:
    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    with CheckpointHook(address_of(listener), run="r", base="b", every=1,
                        retry_for_s=0.6) as hook:
        assert hook.on_step(1, {"x": torch.ones(3)})
        assert hook.flush(30)
        assert hook.stats.failed == 1 and hook.stats.committed == 0


def test_what_cannot_be_staged_costs_that_save_only(
        dead_address: str, caplog: pytest.LogCaptureFixture) -> None:
    hook = CheckpointHook(dead_address, run="r", base="b", every=1)
    for step in (1, 2, 3):
        assert not hook.on_step(step, {"bad": torch.empty(3, device="meta")})
    assert hook.stats.failed == 3
    assert "bad" in hook.stats.last_error
    assert len([r for r in caplog.records if "bad" in r.getMessage()]) == 1
    assert hook.on_step(4, {"good": torch.ones(3)})
    hook.close(0.1)


def test_errors_are_raised_where_asked_for(dead_address: str) -> None:
    hook = CheckpointHook(dead_address, run="r", base="b", every=1, retry_for_s=0.01,
                          raise_errors=True)
    with pytest.raises(StockpotError, match="bad"):
        hook.on_step(1, {"bad": torch.empty(3, device="meta")})
    assert hook.on_step(2, {"good": torch.ones(3)})
    assert hook.flush(30)
    with pytest.raises(StockpotError) as raised:  # the background failure, at the next call
        hook.on_step(3, {"good": torch.ones(3)})
    assert raised.value.code == ErrorCode.UNAVAILABLE
    hook.close(0.1)


def test_only_multiples_of_every_are_saved(dead_address: str) -> None:
    hook = CheckpointHook(dead_address, run="r", base="b", every=5)
    saved = [step for step in range(1, 12) if hook.on_step(step, {"x": torch.ones(3)})]
    assert saved == [5, 10]
    hook.close(0.1)


@pytest.mark.parametrize("arguments", [
    {"address": "nowhere"}, {"address": "host:0"}, {"address": "host:70000"}, {"address": ""},
    {"every": 0}, {"connections": 0}, {"when_full": "explode"}, {"run": ""},
    {"files": "/no/such/folder"},
], ids=str)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: dict[str, object]) -> None:
    given = {"address": "127.0.0.1:7070", "run": "r", "base": "b"} | arguments
    with pytest.raises(StockpotError) as raised:
        CheckpointHook(**given)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("text", "parsed"), [
    ("127.0.0.1:7070", Address("127.0.0.1", 7070)),
    ("some.host:1", Address("some.host", 1)),
    ("[::1]:7070", Address("::1", 7070)),
    ("unix:/run/s.sock", Address(path="/run/s.sock")),
])
def test_addresses(text: str, parsed: Address) -> None:
    assert Address.parse(text) == parsed
    assert str(parsed) == text


def test_a_connection_to_oneself_is_none(dead_address: str,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    # A client may get any free port as its own, that of a daemon that is down as well.
    address = Address.parse(dead_address)
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda to, timeout: connect(
        to, timeout, source_address=(address.host, address.port)))
    with pytest.raises(ConnectionRefusedError):
        address.connect(1.0)


def test_client_says_what_is_wrong(dead_address: str) -> None:
    with Client(dead_address) as client, pytest.raises(StockpotError) as raised:
        client.control.status()
    assert raised.value.code == ErrorCode.UNAVAILABLE
    assert raised.value.retryable
    assert dead_address in raised.value.message
