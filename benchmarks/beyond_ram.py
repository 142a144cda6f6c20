"""Trains a decoder whose states are larger than this machine's memory, all of them on the disk.

    python benchmarks/beyond_ram.py --folder /mnt/fast

The model is a Llama of random weights in fp32, built on the meta device and filled one parameter at
a time. Parameters, gradients and AdamW's states are on the disk; a layer or two at a time are in
memory, while a thread looks at how much the kernel says this process has. Writes
benchmarks/results/beyond_ram.json and .md, and ends with an error if that was more than `--limit`
or the loss does not fall. With `--layers 6 --hidden 1024 --no-output` it takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.engine.apply import fit
from tightfit.engine.disk import check_free
from tightfit.engine.engine import Engine
from tightfit.engine.regions import Region
from tightfit.ledger import Ledger
from tightfit.policies import (
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    Tier,
)
from tightfit.units import GIB, format_bytes

RESULT = Path(__file__).parent / "results" / "beyond_ram"
FP32_BYTES = 4
ON_DISK = 2 + 2 * 2 + 1  # values per parameter: two slots of it and of two moments, one gradient
RESERVE_BYTES = 8 * GIB  # of the disk, for others
SAMPLE_SECONDS = 0.05


@dataclass
class Memory:
    """The most that the kernel has seen of this process, in bytes."""

    anonymous_bytes: int = 0
    resident_bytes: int = 0

    def look(self) -> None:
        """Take a sample; files that are mapped, such as libraries, count as resident only."""
        found = {}
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key in ("RssAnon", "VmRSS"):
                found[key] = int(value.split()[0]) * 1024
        self.anonymous_bytes = max(self.anonymous_bytes, found["RssAnon"])
        self.resident_bytes = max(self.resident_bytes, found["VmRSS"])


@dataclass
class Result:
    """What is written down."""

    parameters: int
    layers: int
    hidden_size: int
    tokens: int
    model_states_bytes: int
    ram_bytes: int
    disk_bytes: int = 0
    start_seconds: float = 0.0
    start: Memory = field(default_factory=Memory)
    training: Memory = field(default_factory=Memory)
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    machine: str = ""


def main() -> None:
    """Train, look, write."""
    options = arguments()
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 256),
        max_position_embeddings=options.tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    check_free(options.folder, ON_DISK * FP32_BYTES * count + RESERVE_BYTES)
    result = Result(
        count,
        options.layers,
        options.hidden,
        options.tokens,
        model_states_bytes=4 * FP32_BYTES * count,
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        machine=machine(),
    )
    engine = start(model, options.folder, result)
    train(engine, options, result)
    text = page(result)
    print(text)
    if options.output is not None:
        options.output.with_suffix(".json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        options.output.with_suffix(".md").write_text(text)
    most = max(result.start.resident_bytes, result.training.resident_bytes)
    assert most <= options.limit * GIB, f"{format_bytes(most)} of memory were taken"
    assert result.losses[-1] < result.losses[0], "the loss does not fall"


def arguments() -> argparse.Namespace:
    """The defaults are two billion parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on a fast disk")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=8.0, help="GiB of memory at most")
    parser.add_argument("--output", type=Path, default=RESULT, help="without its suffix")
    parser.add_argument("--no-output", dest="output", action="store_const", const=None)
    return parser.parse_args()


def start(model: LlamaForCausalLM, folder: Path, result: Result) -> Engine:
    """Fit the model, with all its values made on the way to the disk."""
    policies = Policies(
        placement=PlacementPolicy(Tier.NVME, Tier.NVME, Tier.NVME, Tier.HOST),
        checkpointing=CheckpointingPolicy(True),
        loss=LossPolicy(LossKind.CHUNKED),
        optimizer=OptimizerPolicy(learning_rate=2e-4),
    )
    began = time.perf_counter()
    with watched(result.start), Ledger() as counted:
        engine = fit(model, policies, offload_folder=folder, values=fill)
        result.disk_bytes = counted.total_bytes(Tier.NVME)
    result.start_seconds = time.perf_counter() - began
    return engine


def fill(name: str, values: torch.Tensor, region: Region) -> None:
    """Random weights, the same at every run; norms begin with 1."""
    if values.ndim == 1:
        values.fill_(1.0)
    else:
        values.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(crc32(name.encode())))


def train(engine: Engine, options: argparse.Namespace, result: Result) -> None:
    """The same tokens at every step, so that the loss falls."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(options.vocabulary, (1, options.tokens), generator=generator)
    with watched(result.training):
        for _ in range(options.steps):
            before, began = moved_bytes(), time.perf_counter()
            loss = engine.loss(ids, ids, options.tokens - 1)
            engine.backward(loss)
            engine.step()
            result.step_seconds.append(time.perf_counter() - began)
            result.losses.append(float(loss.detach()))
            read, written = (now - then for now, then in zip(moved_bytes(), before, strict=True))
            result.read_bytes.append(read)
            result.written_bytes.append(written)
            print(f"{result.losses[-1]:.4f} after {result.step_seconds[-1]:.1f} s", flush=True)


@contextmanager
def watched(memory: Memory) -> Iterator[None]:
    """Look at the memory from time to time, in a thread."""
    over = threading.Event()

    def look_on() -> None:
        while not over.wait(SAMPLE_SECONDS):
            memory.look()

    thread = threading.Thread(target=look_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        memory.look()


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


def machine() -> str:
    """What the figures belong to."""
    return (
        f"Python {platform.python_version()}, torch {version('torch')}, transformers "
        f"{version('transformers')}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, {date.today()}"
    )


def page(result: Result) -> str:
    """The result for people."""
    most = max(result.start.resident_bytes, result.training.resident_bytes)
    lines = [
        "# Training beyond memory",
        "",
        f"Made by `benchmarks/beyond_ram.py`: {result.machine}.",
        "",
        f"A Llama of {result.parameters / 1e9:.2f}B parameters in fp32 ({result.layers} layers, "
        f"hidden size {result.hidden_size}), full fine-tuning with AdamW, {result.tokens} tokens "
        f"per step. Parameters, gradients and moments take "
        f"{format_bytes(result.model_states_bytes)}; the machine has "
        f"{format_bytes(result.ram_bytes)} of RAM. All of them are on the disk, what a step "
        f"changes twice, so that one that fails leaves the step before: "
        f"{format_bytes(result.disk_bytes)}.",
        "",
        f"**The process never had more than {format_bytes(most)} in memory**: "
        f"{format_bytes(result.start.resident_bytes)} while the model was made (in "
        f"{result.start_seconds:.0f} s), {format_bytes(result.training.resident_bytes)} in "
        f"training, of which {format_bytes(result.training.anonymous_bytes)} are no mapped files.",
        "",
        "| step | loss | seconds | read | written |",
        "|---|---|---|---|---|",
    ]
    rows = zip(
        result.losses, result.step_seconds, result.read_bytes, result.written_bytes, strict=True
    )
    for number, (loss, seconds, read, written) in enumerate(rows):
        lines.append(
            f"| {number} | {loss:.4f} | {seconds:.1f} | {format_bytes(read)} | "
            f"{format_bytes(written)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
