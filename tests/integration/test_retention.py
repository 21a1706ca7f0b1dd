"""What `stockpot retention` says of rules that keep nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.daemon import Daemon
from tests.integration.test_path import push


def test_a_metric_that_nothing_has_is_warned_of_and_may_come(
        daemon: Daemon, base_folder: Path, base_weights: dict[str, torch.Tensor]) -> None:
    push(daemon, "kept", base_folder, {1: base_weights, 2: base_weights})

    known = daemon.cli("retention", "kept", "--best", "1", "--metric", "loss", "--keep-last", "1")
    assert known.stderr == ""
    unknown = daemon.cli("retention", "kept", "--best", "1", "--metric", "los", "--keep-last", "1")
    assert "'los'" in unknown.stderr
    assert "its metrics are: loss" in unknown.stderr
    report = json.loads(daemon.cli("retention", "kept", "--json").stdout)
    assert [rule["metric"] for rule in report["policy"]["best"]] == ["los"]  # not refused
    assert len(report["warnings"]) == 1

    daemon.cli("eval", "put", "kept@1", "exam", "acc", "0.5")
    both = daemon.cli("retention", "kept", "--best", "1", "--metric", "exam/acc:higher",
                      "--metric", "exam/f1:higher")
    assert "'exam/f1'" in both.stderr
    assert "'exam/acc'" not in both.stderr
    assert "exam/acc, loss" in both.stderr
