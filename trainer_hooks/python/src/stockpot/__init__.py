"""Pushes checkpoints of a training loop to a Stockpot daemon without making the loop wait.

    from stockpot import CheckpointHook

    with CheckpointHook("127.0.0.1:7070", run="demo", base="smollm2", every=100) as hook:
        for step, batch in enumerate(batches, start=1):
            loss = train(batch)
            hook.on_step(step, model, metrics={"loss": loss})

CheckpointHook    for a plain loop; for Hugging Face's Trainer: stockpot.transformers; for
                  Lightning's: stockpot.lightning; torch.distributed.checkpoint: stockpot.dcp
resume            model, optimizer, schedule, loader and random numbers back, bit for bit
adopt_merge       merged weights into the model that trains
ResumableLoader   a DataLoader that continues in the middle of an epoch
Client            the remote calls, one to one, typed
load_ops          torch.ops.stockpot.*: the kernels on torch tensors (stockpot.ops)
load              any artifact (base, checkpoint, merge, variant) as a dict of tensors
read_variant      likewise, of a file that `stockpot export --delta` wrote, without a daemon
StockpotError     what Client and load raise; the hook raises nothing into the loop
"""

from stockpot.adopting import adopt_merge
from stockpot.client import Client
from stockpot.connection import Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.hook import CheckpointHook
from stockpot.loaders import ResumableLoader
from stockpot.loading import Artifact, load
from stockpot.ops import load_ops
from stockpot.progress import Progress
from stockpot.record import HookStats
from stockpot.resuming import Resumed, resume
from stockpot.rpc.ttypes import Kind, RunConfig
from stockpot.variant_file import read_variant

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "CheckpointHook",
    "Client",
    "ErrorCode",
    "HookStats",
    "Kind",
    "Progress",
    "ResumableLoader",
    "Resumed",
    "RunConfig",
    "Security",
    "StockpotError",
    "adopt_merge",
    "load",
    "load_ops",
    "read_variant",
    "resume",
]
