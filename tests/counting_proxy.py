"""A TCP proxy that counts the bytes that pass: what really travels between a hook and a daemon."""

from __future__ import annotations

import socket
import threading

READ_BYTES = 1 << 20


class CountingProxy:
    """Listens on a loopback port and passes everything on to `target` ("host:port")."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._bytes = 0  # guarded by _lock
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def passed_bytes(self) -> int:
        """So far, both ways together."""
        with self._lock:
            return self._bytes

    def close(self) -> None:
        """Takes no more connections; those that are open end with their ends."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(READ_BYTES):
                with self._lock:
                    self._bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()
