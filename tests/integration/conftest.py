"""One tiny base and one daemon for the module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny_llama
from tests.daemon import Daemon, running


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    tiny_llama.make(folder)
    return folder


@pytest.fixture(scope="module")
def base_weights(base_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(base_folder / "model.safetensors")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Iterator[Daemon]:
    data = tmp_path_factory.mktemp("daemon") / "data"
    with running(data, "tiny") as running_daemon:
        running_daemon.cli("import-base", "tiny", base_folder)
        yield running_daemon
