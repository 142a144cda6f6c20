"""How long sums and gathers take by size, and whether larger pieces would shorten a step.

    python benchmarks/bucket_sizes.py [--ranks 2]

Prints a table: one collective over gloo by its size; then the gradients of SmolLM2-135M's shape
summed tensor by tensor in their place, as ZeRO-0 does it here, beside buckets of 25 MiB that they
are copied to and from, as DistributedDataParallel does it; and the layers of that shape gathered
one by one and several at once. Knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

KIB, MIB = 2**10, 2**20
SIZES = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BUCKET_BYTES = 25 * MIB
LAYERS, HIDDEN, INNER, HEADS_WIDTH, KEY_WIDTH, VOCABULARY = 30, 576, 1536, 576, 192, 49152
LAYER = (
    (HEADS_WIDTH, HIDDEN), (KEY_WIDTH, HIDDEN), (KEY_WIDTH, HIDDEN), (HIDDEN, HEADS_WIDTH),
    (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,), (HIDDEN,),
)  # fmt: skip
TIMES = 7


def main() -> None:
    """Start the ranks and print what rank 0 measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_rank, args=(n, ranks, folder)) for n in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    rows = [*_by_size(ranks), *_gradients(), *_gathers(ranks)]
    if rank == 0:
        print(f"torch {torch.__version__}, gloo, {ranks} ranks of one thread, median of {TIMES}\n")
        print("| what | ms |\n|---|---|")
        for name, seconds in rows:
            print(f"| {name} | {1000 * seconds:.2f} |")
    dist.destroy_process_group()


def _by_size(ranks: int) -> list[tuple[str, float]]:
    rows = []
    for size in SIZES:
        name = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        whole = torch.zeros(size // 4)
        part = whole.new_zeros(whole.numel() // ranks)
        rows.append((f"all-reduce of {name}", _seconds(partial(_sum, [whole]))))
        rows.append((f"all-gather of {name}", _seconds(partial(_gather, whole, part, 1))))
    return rows


def _gradients() -> list[tuple[str, float]]:
    gradients = [torch.zeros(shape) for _ in range(LAYERS) for shape in LAYER]
    gradients += [torch.zeros(VOCABULARY, HIDDEN), torch.zeros(HIDDEN)]
    count = len(gradients)
    return [
        (
            f"{count} gradients of SmolLM2-135M, each in its place",
            _seconds(lambda: _sum(gradients)),
        ),
        ("the same in buckets of 25 MiB", _seconds(lambda: _in_buckets(gradients))),
    ]


def _gathers(ranks: int) -> list[tuple[str, float]]:
    each = sum(torch.Size(shape).numel() for shape in LAYER)
    rows = []
    for together in (1, 2, 5):
        whole = torch.zeros(each * together // ranks * ranks)
        part = whole.new_zeros(whole.numel() // ranks)

        seconds = _seconds(partial(_gather, whole, part, LAYERS // together))
        rows.append((f"its {LAYERS} layers gathered, {together} at once", seconds))
    return rows


def _gather(whole: torch.Tensor, part: torch.Tensor, times: int) -> None:
    for _ in range(times):
        dist.all_gather_single(whole, part)


def _sum(tensors: Sequence[torch.Tensor]) -> None:
    """All on their way at once, as backward leaves them."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def _in_buckets(gradients: Sequence[torch.Tensor]) -> None:
    buckets: list[list[torch.Tensor]] = [[]]
    filled = 0
    for gradient in gradients:
        if filled + gradient.nbytes > BUCKET_BYTES and buckets[-1]:
            buckets.append([])
            filled = 0
        buckets[-1].append(gradient)
        filled += gradient.nbytes
    flats = [torch.cat([tensor.view(-1) for tensor in bucket]) for bucket in buckets]
    _sum(flats)
    for flat, bucket in zip(flats, buckets, strict=True):
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.view(-1).copy_(part)


def _seconds(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(TIMES):
        dist.barrier()
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return median(found)


if __name__ == "__main__":
    main()
