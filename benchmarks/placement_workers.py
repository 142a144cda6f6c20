"""Runs contenders: each in processes of its own, as many as the setting has ranks.

They are forked from a server that has imported the libraries, live at the same time and do nothing
until it is their turn, so that a turn of one can be laid beside the turn of another a moment later.
A contender that fails says why; the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from placement_contenders import Contender, Trainer
from placement_memory import (
    anonymous_bytes,
    disk_bytes,
    forget_peak,
    peak_anonymous_bytes,
    return_freed_memory,
)
from placement_setting import Setting, batch, make_model
from tightfit.bill.table import Phase
from tightfit.ledger import Ledger
from tightfit.policies import Tier

GIVEN_UP_AFTER_SECONDS = 300.0  # without an answer
WARM_UP_STEPS = 1  # of a turn: caches are somebody else's when it begins
_IMPORTED_ONCE = ["placement_peers", "transformers.models.llama.modeling_llama", "deepspeed"]


@dataclass(frozen=True)
class StepSeconds:
    """One optimizer step of one rank; `waited` is the part of forward that is waiting for updates
    of the step before, `processor` what all threads of the process have computed."""

    forward: float
    backward: float
    step: float
    waited: float
    processor: float


class Failed(Exception):
    """A contender cannot run; the message says why."""


class Runner:
    """One contender in its processes."""

    def __init__(self, contender: Contender, setting: Setting, folder: Path) -> None:
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._folder = folder
        context = forked()
        folder.mkdir()
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, contender, setting, folder, rank)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def begin(self, *command: Any) -> None:
        """Ask all ranks something; the answers come with `answers`."""
        for end in self._ends:
            with suppress(BrokenPipeError):  # who is gone has said why
                end.send(command)

    def answers(self) -> list[Any]:
        """Of all ranks, to what was asked.

        Raises:
            Failed: one has none.
        """
        return [self._answer(rank) for rank in range(len(self._ends))]

    def _answer(self, rank: int) -> Any:
        end = self._ends[rank]
        try:
            if not end.poll(GIVEN_UP_AFTER_SECONDS):
                raise Failed(f"no answer for {GIVEN_UP_AFTER_SECONDS:.0f} s")
            kind, answer = end.recv()
        except (EOFError, ConnectionError):
            raise Failed(f"the process ended; it said: {self._last_words(rank)}") from None
        if kind == "failed":
            raise Failed(answer)
        return answer

    def _last_words(self, rank: int) -> str:
        log = (self._folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        return " ".join(log.split()[-40:])

    def end(self) -> None:
        """Let the processes go."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()


def forked() -> Any:
    """How processes begin: forked from a server that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def _serve(
    end: Connection, contender: Contender, setting: Setting, folder: Path, rank: int
) -> None:
    """A rank: answer until nobody asks any more."""
    say_into(folder / f"rank{rank}.log")
    join(rank, setting.ranks, folder / "store")
    served: _Served | None = None
    try:
        while True:
            command, *arguments = end.recv()
            if served is None:
                served = _Served(contender, setting, folder, rank)
            end.send(("answer", getattr(served, command)(*arguments)))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this contender's result
        traceback.print_exc()
        end.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        sys.stderr.flush()
        os._exit(0)  # what a library's threads still have in mind does not matter


def say_into(log: Path) -> None:
    """What this process and its libraries print goes there."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)


def join(rank: int, ranks: int, store: Path) -> None:
    """Meet the other ranks at a file."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)


class _Served:
    """A trainer and what can be asked of it."""

    def __init__(self, contender: Contender, setting: Setting, folder: Path, rank: int) -> None:
        self._setting, self._rank = setting, rank
        self._steps = 0
        self._losses: list[float] = []
        self._unused_bytes = anonymous_bytes()
        self._counter = Ledger()
        with self._counter:
            model = make_model(setting)
            self._counter.adopt(model)
            self._trainer: Trainer = contender.build(model, setting, folder)
            self._one_step()

    def start(self) -> None:
        """Be there."""

    def turn(self, steps: int) -> list[dict[str, float]]:
        """Train; the seconds of all but the first steps."""
        dist.barrier()
        seconds = [self._one_step() for _ in range(WARM_UP_STEPS + steps)]
        self._trainer.drain()
        return [asdict(step) for step in seconds[WARM_UP_STEPS:]]

    def losses(self) -> list[float]:
        """Of all steps so far, the mean over this rank's tokens times what makes ranks' means."""
        return self._losses

    def memory(self) -> dict[str, int]:
        """Peaks of two more steps, and what they move, per step."""
        return_freed_memory()
        with ExitStack() as stack:
            stack.enter_context(self._counter)
            self._trainer.counting(self._counter)
            self._whole_step()
            sections_before = self._counter.sections().keys()
            self._counter.chapter = "measured "
            self._counter.set_section(Phase.FORWARD)  # peers' code does not say when it begins
            forget_peak()
            before = disk_bytes()
            moved = self._trainer.moved_bytes(self._whole_step)
            disk = {name: count - before[name] for name, count in disk_bytes().items()}
            sections = self._counter.sections()
        measured = [sections[key] for key in sections.keys() - sections_before]
        peaks = {tier: max(sum(s.get(tier, {}).values()) for s in measured) for tier in Tier}
        return {
            "device": peaks[Tier.DEVICE],
            "host": peaks[Tier.HOST] + peaks[Tier.PINNED],
            "process": peak_anonymous_bytes() - self._unused_bytes,
            "moved": moved,
            **disk,
        }

    def _whole_step(self) -> None:
        """With the updates that it leaves for later."""
        self._one_step()
        self._trainer.drain()

    def _one_step(self) -> StepSeconds:
        trainer = self._trainer
        input_ids, labels = batch(self._setting, self._rank, self._steps)
        waited = trainer.waited_seconds()
        processor = process_time()
        start = perf_counter()
        loss = trainer.forward(input_ids, labels)
        after_forward = perf_counter()
        trainer.backward(loss)
        after_backward = perf_counter()
        trainer.step()
        end = perf_counter()
        self._losses.append(float(loss) * trainer.loss_scale)
        self._steps += 1
        return StepSeconds(
            forward=after_forward - start,
            backward=after_backward - after_forward,
            step=end - after_backward,
            waited=trainer.waited_seconds() - waited,
            processor=process_time() - processor,
        )
