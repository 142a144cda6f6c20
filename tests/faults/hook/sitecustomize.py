"""Makes one rank of a real command fail at a chosen point.

Python imports it in every process that has this folder in its path. `FAULT` is a `Fault` of
`driver.py` as JSON, `FAULT_NOTES` a folder, where each process leaves a file of its number, and the
one that fails the time. tightfit knows nothing of it: its functions are exchanged when their
module has been imported. Only the first attempt fails.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

Act = Callable[..., Any]
# Not the engine's: the rank that plans makes dry runs with it, as many as the cache lacks.
STEP = ("tightfit.training.loop", "TrainingLoop._one_step")
# Where a rank can fail: a function that is called there, and at which of its calls after the steps
# that the fault waits for.
PLACES: dict[str, tuple[str, str, int]] = {
    "versions": ("tightfit.launch.agreement", "version", 2),
    "loading": ("tightfit.training.tensor_file", "TensorReader.read", 3),
    "data": ("tightfit.training.batches", "collate", 1),
    "forward": ("transformers.models.llama.modeling_llama", "LlamaMLP.forward", 2),
    "backward": ("transformers.models.llama.modeling_llama", "LlamaMLP.forward", 2),
    "step": ("tightfit.engine.optimizer", "PlacedOptimizer._update_on_device", 1),
    "evaluation": ("tightfit.engine.engine", "Engine.evaluation_loss", 1),
    "answer": ("tightfit.training.evaluation", "answer", 1),
    "layout": ("tightfit.training.tensor_file", "lay_out", 2),
    "opening": ("tightfit.training.tensor_file", "TensorWriter.__enter__", 1),
    "writing": ("tightfit.training.tensor_file", "_write", 5),
    "flushing": ("tightfit.training.checkpoint", "flush", 1),
    "renaming": ("tightfit.training.checkpoint", "_put_in_place", 1),
    "pruning": ("tightfit.training.checkpoint", "prune_checkpoints", 1),
}


def fail(kind: str) -> None:
    """Do what befalls the rank, and note when."""
    (Path(os.environ["FAULT_NOTES"]) / "failed").write_text(str(time.time()))
    if kind == "interrupt":
        interrupt()
        return
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":  # hangs, and says nothing to anybody
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "memory":
        import torch

        raise torch.OutOfMemoryError("no memory left for this test")
    if kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise ValueError("something odd")


def interrupt() -> None:
    """Ctrl-C reaches the supervisor; this rank goes on when it has been passed on to it."""
    passed_on: list[int] = []
    handler: Any = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        passed_on.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, note)
    os.kill(os.getppid(), signal.SIGINT)
    while not passed_on:
        signal.sigtimedwait([], 0.01)  # a signal that came is handled when this returns


class Trap:
    """Counts steps, and calls of the place after them; at the chosen one the rank fails."""

    def __init__(self, place: str, kind: str, after: int) -> None:
        self._place, self._kind, self._left = place, kind, after
        self._calls = 0
        self._at = PLACES[place][2]

    def counting(self, step: Act) -> Act:
        """A step of the run."""

        def counted(*args: Any, **keys: Any) -> Any:
            done = step(*args, **keys)
            self._left -= 1
            return done

        return counted

    def watching(self, plain: Act) -> Act:
        """The function of the place."""

        def watched(*args: Any, **keys: Any) -> Any:
            if self._left > 0:
                return plain(*args, **keys)
            if self._place in ("step", "backward"):
                return self._fail_later(plain(*args, **keys))
            self._calls += 1
            if self._calls == self._at:
                if self._kind == "other":
                    return "another one"
                fail(self._kind)
            return plain(*args, **keys)

        return watched

    def _fail_later(self, done: Any) -> Any:
        """After an update, or while the gradient of what was computed is on its way back, which
        there is none of where a run evaluates."""
        if self._place == "backward" and not done.requires_grad:
            return done
        self._calls += 1
        if self._calls != self._at:
            return done
        if self._place == "backward":
            done.register_hook(lambda gradient: fail(self._kind))
        else:
            fail(self._kind)
        return done


class Exchange:
    """A finder of modules that exchanges functions in them, once each is there."""

    def __init__(self, exchanged: Sequence[tuple[str, str, Callable[[Act], Act]]]) -> None:
        self._exchanged = exchanged
        self._waiting = {module for module, _, _ in exchanged}

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """As finders do; asks the others for the module itself."""
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        spec = find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        plain = loader.exec_module

        def execute(module: ModuleType) -> None:
            plain(module)
            for where, function, wrap in self._exchanged:
                if where == name:
                    exchange(module, function, wrap)

        loader.exec_module = execute
        return spec


def exchange(owner: Any, function: str, wrap: Callable[[Act], Act]) -> None:
    """Put `wrap` around a function of a module, or a method of a class in it."""
    *classes, name = function.split(".")
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, name, wrap(getattr(owner, name)))


def set_trap(fault: dict[str, Any]) -> None:
    """In the rank that is to fail."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if os.environ.get("RANK") != str(fault["rank"]) or attempt != "0":
        return
    trap = Trap(fault["place"], fault["kind"], fault["after"])
    module, function, _ = PLACES[fault["place"]]
    exchanged = [(module, function, trap.watching), (*STEP, trap.counting)]
    sys.meta_path.insert(0, Exchange(exchanged))


if "FAULT_NOTES" in os.environ:
    (Path(os.environ["FAULT_NOTES"]) / f"process {os.getpid()}").touch()
    set_trap(json.loads(os.environ["FAULT"]) or {"rank": None})
