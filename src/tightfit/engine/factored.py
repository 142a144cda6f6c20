"""Adafactor (https://arxiv.org/abs/1804.04235): a row and a column in place of a second moment.

What `optim: adafactor` means to transformers: its `Adafactor` with scale_parameter and
relative_step off, so that the learning rate is the schedule's, without a first moment. A matrix is
gone through three times, some rows at a time: for the squares of its gradient, for the size of its
update, which is clipped, and to apply it. So it must be here whole. Of more dimensions the first
ones count matrices; a vector keeps its second moment. Knows nothing of shards or disks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from tightfit.engine.arithmetic import Arithmetic, Numbers
from tightfit.engine.rules import CHUNK_VALUES, REMAINDERS, Piece, Rule, Scratch
from tightfit.errors import UnsupportedError
from tightfit.policies import Master

ROW, COLUMN, WHOLE = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"
_DECAY = -0.8  # the exponent of the step's number
_EPSILON = 1e-30  # of squares
_MOST_OF_UPDATE = 1.0  # root mean square
_WORK = 3  # squares or the update; a column and its reciprocal root; rows, or a chunk's column


class Factored(Rule):
    """Updates whole parameters; made by `rule_of`.

    Args:
        master: as of `Rule`.
    """

    def __init__(self, master: Master) -> None:
        super().__init__(Arithmetic((), counts=True, spare=False, apply=_unused), None, master)

    def states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, torch.dtype]]:
        """See `Rule.states`.

        Raises:
            UnsupportedError: a row is too long for what updates work in.
        """
        values, remainder = prod(shape), super().states(shape)
        if len(shape) < 2 or values == 0:
            return {WHOLE: (values, torch.float32), **remainder}
        if shape[-1] > CHUNK_VALUES:
            raise UnsupportedError(
                f"adafactor: a matrix has rows of {shape[-1]} values, and {CHUNK_VALUES} is the "
                "most; adamw_8bit has small states too"
            )
        return {
            ROW: (values // shape[-1], torch.float32),
            COLUMN: (values // shape[-2], torch.float32),
            **remainder,
        }

    def _buffers(self, gradient_type: torch.dtype) -> tuple[int, int, int, int]:
        narrow = int(gradient_type is not torch.float32)
        return narrow, int(self._master is not Master.FP32), 0, _WORK

    def scratch_values(
        self, largest: int, gradient_type: torch.dtype, chunk_values: int = CHUNK_VALUES
    ) -> int:
        """See `Rule.scratch_values`; no less for a card, as a row has to fit."""
        return super().scratch_values(largest, gradient_type, max(chunk_values, CHUNK_VALUES))

    @torch.no_grad()
    def update(
        self, pieces: Sequence[Piece], numbers: Numbers, clip: Tensor | None, scratch: Scratch
    ) -> None:
        """See `Rule.update`; pieces are whole parameters."""
        for piece in pieces:
            if clip is not None and piece.gradient.dtype is torch.float32:
                piece.gradient.mul_(clip)
            _Update(self, piece, scratch, clip).apply(numbers)


@dataclass(frozen=True)
class _Rows:
    """Some rows of one matrix, as runs of a parameter's flat tensors.

    Attributes:
        matrix: its number.
        first, last: its rows, counted through all matrices.
    """

    matrix: int
    first: int
    last: int


class _Update:
    """One parameter's."""

    def __init__(self, rule: Rule, piece: Piece, scratch: Scratch, clip: Tensor | None) -> None:
        self._rule, self._piece, self._scratch, self._clip = rule, piece, scratch, clip
        self._squares, self._column, self._spare = scratch.work.split(scratch.chunk_values)
        assert piece.step is not None
        self._fresh = piece.step.pow(_DECAY)  # the share of this step's squares
        # Of vectors: rows of one value, whose column there is none of.
        self._width, self._height, self._matrices = 1, piece.values, 1
        if ROW in piece.states and piece.values:
            rows, columns = piece.states[ROW].numel(), piece.states[COLUMN].numel()
            self._width = piece.values // rows
            self._height = piece.values // columns
            self._matrices = rows // self._height if detect_fake_mode() is None else 1

    def apply(self, numbers: Numbers) -> None:
        """All three passes."""
        if not self._piece.values:
            return
        square = torch.zeros_like(self._fresh)
        for matrix in range(self._matrices):
            self._add_squares(matrix)
        for matrix in range(self._matrices):
            for rows in self._rows(matrix):
                square += self._direction(rows).square_().sum()
        size = (square / self._piece.values).sqrt_().div_(_MOST_OF_UPDATE).clamp_(min=1.0)
        for matrix in range(self._matrices):
            for rows in self._rows(matrix):
                chunk = self._chunk(rows)
                weight = self._rule.weight_of(chunk, self._scratch)  # works where squares do
                update = self._direction(rows).div_(size).view(-1)
                weight.add_(weight, alpha=-numbers.learning_rate * numbers.weight_decay)
                weight.sub_(update, alpha=numbers.learning_rate)
                self._rule.keep_weight(chunk, weight, self._scratch)

    def _rows(self, matrix: int) -> Iterator[_Rows]:
        """A matrix in runs of whole rows; of a fake one the first, as all are alike."""
        step = max(1, self._scratch.chunk_values // self._width)
        first, last = matrix * self._height, (matrix + 1) * self._height
        if detect_fake_mode() is not None:
            last = min(last, first + step)
        for begin in range(first, last, step):
            yield _Rows(matrix, begin, min(begin + step, last))

    def _gradient(self, rows: _Rows) -> Tensor:
        """Widened and clipped, `[rows, width]`."""
        values = self._piece.gradient[self._run(rows)]
        if values.dtype is not torch.float32:
            values = self._scratch.gradient[: values.numel()].copy_(values)
            if self._clip is not None:
                values.mul_(self._clip)
        return values.view(-1, self._width)

    def _run(self, rows: _Rows) -> slice:
        return slice(rows.first * self._width, rows.last * self._width)

    def _chunk(self, rows: _Rows) -> Piece:
        """What keeps the weight of some rows."""
        piece, run = self._piece, self._run(rows)
        kept = {
            name: piece.states[name][run] for name in REMAINDERS.values() if name in piece.states
        }
        return replace(
            piece,
            weight=None if piece.weight is None else piece.weight[run],
            gradient=piece.gradient[run],
            states=kept,
            narrow=None if piece.narrow is None else piece.narrow[run],
        )

    def _add_squares(self, matrix: int) -> None:
        """Take this step's squares into the states."""
        states = self._piece.states
        sums = self._column[: self._width].zero_()
        for rows in self._rows(matrix):
            gradient = self._gradient(rows)
            squares = self._squares[: gradient.numel()].view_as(gradient)
            torch.mul(gradient, gradient, out=squares).add_(_EPSILON)
            if WHOLE in states:
                states[WHOLE][rows.first : rows.last].lerp_(squares.view(-1), self._fresh)
                continue
            means = self._spare[: len(gradient)]
            torch.mean(squares, 1, out=means)
            states[ROW][rows.first : rows.last].lerp_(means, self._fresh)
            own = self._spare[: self._width]
            torch.sum(squares, 0, out=own)
            sums.add_(own)
        if COLUMN in states:
            column = states[COLUMN][matrix * self._width : (matrix + 1) * self._width]
            column.lerp_(sums.div_(self._height), self._fresh)

    def _direction(self, rows: _Rows) -> Tensor:
        """The gradient over the roots of the states, `[rows, width]`."""
        states, gradient = self._piece.states, self._gradient(rows)
        found: Tensor = self._squares[: gradient.numel()].view_as(gradient)
        if WHOLE in states:
            torch.rsqrt(states[WHOLE][rows.first : rows.last].view_as(found), out=found)
            return found.mul_(gradient)
        own = states[ROW][rows.matrix * self._height : (rows.matrix + 1) * self._height]
        row, column = self._spare[: len(gradient)], self._column[: self._width]
        torch.div(states[ROW][rows.first : rows.last], own.mean(), out=row).rsqrt_()
        run = slice(rows.matrix * self._width, (rows.matrix + 1) * self._width)
        torch.rsqrt(states[COLUMN][run], out=column)
        torch.mul(gradient, row.unsqueeze(1), out=found)
        return found.mul_(column)


def _unused(*unused: object) -> None:
    raise AssertionError("updates of whole parameters have no arithmetic of pieces")
