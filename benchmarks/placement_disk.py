"""How fast states stream through memory: the disk itself, tightfit's pipeline, DeepSpeed's swapper.

Each pass reads all records and writes them all, as an optimizer step does, with nothing to compute.
The disk itself is the same requests from threads that wait for nobody. All go past the kernel's
cache. Passes of the three take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from placement_memory import disk_bytes
from placement_peers import SUBGROUP_VALUES, disk_tiers, offloading
from placement_setting import Setting
from tightfit.bill.on_disk import PIECE_VALUES
from tightfit.bill.table import Kind
from tightfit.engine.disk import DiskFile
from tightfit.engine.pipeline import BUFFERS, DiskTier, Part, ReadAhead, Writes
from tightfit.engine.slab import HostSlab, memory_of

RAW, TIGHTFIT, DEEPSPEED = "the disk itself", "tightfit's pipeline", "DeepSpeed's swapper"
RECORD_BYTES = 3 * 4 * PIECE_VALUES  # master and two moments in fp32
THREADS = 2  # that read, and as many that write

Pass = Callable[[], None]


def stream(folder: Path, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of each pass by name, or why it could not run, and the bytes that a pass moves."""
    results: dict[str, Any] = {}
    passes: dict[str, Pass] = {}
    records = total_bytes // RECORD_BYTES
    pass_bytes = 2 * records * RECORD_BYTES
    makers = {RAW: raw_pass, TIGHTFIT: tightfit_pass, DEEPSPEED: deepspeed_pass}
    for name, make in makers.items():
        (folder / name).mkdir(parents=True)
        results[name] = {"seconds": []}
        try:
            passes[name] = make(folder / name, records)
            passes[name]()  # blocks that were never written are slower the first time
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a part of the result
            passes.pop(name, None)
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
    for number in range(rounds):
        names = list(passes)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            moved_bytes, start = sum(disk_bytes().values()), perf_counter()
            passes[name]()
            results[name]["seconds"].append(perf_counter() - start)
            moved_bytes = sum(disk_bytes().values()) - moved_bytes
            assert abs(moved_bytes / pass_bytes - 1) < 0.01, f"{name} has moved {moved_bytes} bytes"
    return {"pass_bytes": pass_bytes, "passes": results}


def raw_pass(folder: Path, records: int) -> Pass:
    """Threads that read one file and threads that write another, each its share of records."""
    slab = HostSlab(torch.device("cpu"))
    reserved = [
        slab.reserve((RECORD_BYTES,), torch.uint8, Kind.TRANSFER, align=4096)
        for _ in range(2 * THREADS)
    ]
    slab.allocate()
    buffers = [memory_of(place.tensor.zero_()) for place in reserved]
    files = [DiskFile.create(folder, name, records * RECORD_BYTES) for name in ("read", "written")]
    assert all(file.direct for file in files), f"{folder} has no direct requests"
    _all_of(os.pwritev, files[0], buffers[0], range(records))
    pool = ThreadPoolExecutor(2 * THREADS)

    def one_pass() -> None:
        work = []
        for thread in range(THREADS):
            mine = range(thread, records, THREADS)
            work.append(pool.submit(_all_of, os.preadv, files[0], buffers[thread], mine))
            work.append(pool.submit(_all_of, os.pwritev, files[1], buffers[-1 - thread], mine))
        for share in work:
            share.result()

    one_pass.keep = reserved  # type: ignore[attr-defined]  # the buffers live as long as the pass
    return one_pass


def _all_of(
    request: Callable[..., int], file: DiskFile, buffer: memoryview, records: range
) -> None:
    for record in records:
        done = request(file.descriptor, [buffer], record * RECORD_BYTES)
        assert done == RECORD_BYTES, "a short request"


def tightfit_pass(folder: Path, records: int) -> Pass:
    """The engine's own pipeline, from one slot to the other and the next time back."""
    tier = DiskTier(folder)
    slab = HostSlab(torch.device("cpu"))
    tier.buffers.need(RECORD_BYTES)
    tier.buffers.reserve(slab, BUFFERS)
    slab.allocate()
    size = {Kind.OPTIMIZER_STATES: records * RECORD_BYTES}
    slots = tier.create({"slot_a": size, "slot_b": size})
    for record in range(records):
        buffer = tier.buffers.take()
        assert buffer is not None  # it has waited for one
        write = Part(slots[0], record * RECORD_BYTES, RECORD_BYTES).write(buffer.zero_())
        tier.buffers.give_back(buffer, [write])

    def one_pass() -> None:
        places = [(record * RECORD_BYTES, RECORD_BYTES) for record in range(records)]
        pieces = ([Part(slots[0], *place)] for place in places)
        writes = Writes()
        with closing(ReadAhead(tier.buffers, pieces)) as ahead:
            for place in places:
                with ahead.piece() as piece:
                    write = Part(slots[1], *place).write(piece.buffer)
                    piece.busy.append(write)
                    writes.add(write)
        writes.finish()
        slots.reverse()

    return one_pass


def deepspeed_pass(folder: Path, records: int) -> Pass:
    """ZeRO-3's own walk over its subgroups, each swapped in and out, without the update."""
    import deepspeed

    width = 2**11
    layers = records * PIECE_VALUES // SUBGROUP_VALUES
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    setting = Setting("", ranks=1, hidden_size=width, intermediate_size=0, sequences=1)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=offloading(setting, disk_tiers(folder)),
    )
    engine.backward(engine(torch.zeros(1, width)).sum())
    engine.step()  # there are no moments before the first
    optimizer = engine.optimizer
    for swapped in optimizer.optimizer_swapper.swap_params_info.values():
        swapped.swapped_gradients.clear()  # they would be read too
    subgroups = range(len(optimizer.fp16_groups))
    assert len(subgroups) == layers, "a subgroup is not a layer"
    assert all(optimizer._swappable_optimizer_subgroup(subgroup) for subgroup in subgroups)

    def one_pass() -> None:
        for subgroup in subgroups:
            names: set[str] = set()  # given, so that it reads ahead
            optimizer._optimizer_states_and_gradient_swap_in(subgroup, names)
            optimizer._optimizer_states_and_gradient_swap_out(subgroup, names)

    return one_pass
