"""Starts and stops the real stockpotd for tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 60.0


def bin_dir() -> Path:
    """Where the programs are: STOCKPOT_BIN_DIR, or the release build of this tree."""
    default = Path(__file__).resolve().parents[1] / "build" / "release" / "bin"
    return Path(os.environ.get("STOCKPOT_BIN_DIR", default))


def free_port() -> int:
    """A loopback port that was free a moment ago, and that no client gets as its own: one that
    calls a dead daemon on such a port now and then reaches itself.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = 10000 if ephemeral > 12000 else 1024
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(lowest, max(ephemeral, lowest + 1))))
            return probe.getsockname()[1]


class Daemon:
    """One stockpotd over a data folder; it can be killed and started again on the same ports."""

    def __init__(self, data: Path, base: str = "", *flags: str) -> None:
        self.data = data
        self.http = f"127.0.0.1:{free_port()}"
        self.thrift = f"127.0.0.1:{free_port()}"
        self.log = data.with_name(data.name + ".log")
        self._flags = [*(["--base", base] if base else []), *flags]
        self.environment: dict[str, str] = {}  # of the next start, beside this process's own
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def start(self) -> Daemon:
        """Returns once it listens."""
        addresses = self.data / "addresses.json"
        addresses.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [bin_dir() / "stockpotd", "--data", self.data, "--http", self.http,
                 "--thrift", self.thrift, *self._flags], stdout=log, stderr=log,
                env=os.environ | self.environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not addresses.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"stockpotd did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)
        json.loads(addresses.read_text())
        return self

    def kill(self) -> None:
        """Kill -9."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        if self.process.poll() is None:
            self.kill()
            raise AssertionError("stockpotd did not stop within 60 s of SIGTERM")
        return self.process.returncode

    def rss_bytes(self) -> int:
        """Resident memory."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def cli(self, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs `stockpot ARGS` against this daemon."""
        environment = os.environ | {"STOCKPOT_SERVER": self.thrift}
        done = subprocess.run([bin_dir() / "stockpot", *map(str, args)], env=environment,
                              capture_output=True, text=True, timeout=600)
        if check and done.returncode != 0:
            raise AssertionError(f"stockpot {args}: exit {done.returncode}\n{done.stderr}")
        return done


@contextlib.contextmanager
def running(data: Path, base: str = "", *flags: str) -> Iterator[Daemon]:
    """A daemon for the length of a with block."""
    daemon = Daemon(data, base, *flags).start()
    try:
        yield daemon
    finally:
        daemon.stop()
