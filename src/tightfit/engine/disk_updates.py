"""Updates of parameters that live on the disk and whose states are in the host's memory.

In a step their values pass through the pipeline's buffers, in the order of forward: a piece is read
ahead, updated with its run of the states and written to the other of the parameter's two places
(`disk_parameters.py`). One that has an fp32 master is not read, as it is made from that.

States and masters change where they are. After a step that the disk has failed in, parameters are
those of the step before and the states of some are not. Knows nothing of rules, or of when an
update is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from tightfit.engine.disk_parameters import DiskParameters
from tightfit.engine.pipeline import DiskTier, Part, ReadAhead
from tightfit.engine.rules import Piece, run_of


class DiskUpdates:
    """`begin`, `update` for each parameter and `finish` make a step.

    Args:
        parameters: those that are updated so.
        values: where they live.
        disk: asked for buffers that hold a piece.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], values: DiskParameters, disk: DiskTier
    ) -> None:
        self._parameters = frozenset(parameters)
        self._values = values
        self._disk = disk
        self._due: dict[nn.Parameter, Piece] = {}
        self._reading: ReadAhead | None = None
        for parameter in self._parameters:
            for begin, end in self._runs(parameter):
                disk.buffers.need((end - begin) * parameter.element_size())

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is updated here."""
        return parameter in self._parameters

    def _runs(self, parameter: nn.Parameter) -> Sequence[tuple[int, int]]:
        """Its pieces; in a dry run the first, as they are alike."""
        return self._values.runs(parameter)[: 1 if self._disk.is_imaginary else None]

    def begin(self, due: Mapping[nn.Parameter, Piece]) -> None:
        """All updates of a step are known: reading begins.

        Args:
            due: in the order in which `update` will be called, pieces of the whole parameters
                without their values: `weight` is an fp32 master or None, `narrow` is None.
        """
        assert self._reading is None, "the step before was not finished"
        self._due = dict(due)
        parts: list[list[Part]] = [
            [self._values.part(parameter, begin, end)] if piece.weight is None else []
            for parameter, piece in due.items()
            for begin, end in self._runs(parameter)
        ]
        self._reading = ReadAhead(self._disk.buffers, parts)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, apply: Callable[[Piece], None]) -> None:
        """Update a parameter; in any thread, allocates nothing of any size.

        Args:
            apply: called with one run of its piece after the other, and with their values.

        Raises:
            DiskError: something could not be read or written; the step is given up.
        """
        assert self._reading is not None
        piece, width = self._due[parameter], parameter.element_size()
        try:
            for begin, end in self._runs(parameter):
                with self._reading.piece() as use:
                    values = use.buffer[: (end - begin) * width].view(parameter.dtype)
                    apply(_with_values(run_of(piece, begin, end), values))
                    self._values.write(parameter, begin, end, use)
            self._values.let_read(parameter)
        except BaseException:
            self.give_up()
            raise

    def finish(self) -> None:
        """Return when all is written; nothing to do when no step was begun, or it was given up.

        Raises:
            DiskError: something could not be; the step is given up.
        """
        if self._reading is None:
            return
        try:
            self._values.finish()
        except BaseException:
            self.give_up()
            raise
        self._values.turn(self._due)
        self._reading = None
        self._due.clear()

    def give_up(self) -> None:
        """End a step that has failed; all buffers are free again. Nothing when none was begun."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None
            self._values.give_up()
            self._due.clear()


def _with_values(piece: Piece, values: torch.Tensor) -> Piece:
    """A piece that writes to `values`: they are what it updates, or what is made from a master."""
    if values.dtype is torch.float32:
        return replace(piece, weight=values)
    return replace(piece, narrow=values)
