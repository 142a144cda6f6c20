"""The optimizers' updates of flat pieces of parameters, with states in the policy's format.

Values pass through the processor's cache a chunk at a time: a 16-bit gradient is widened, clipped
and applied there, 8-bit moments and split masters are put together there and taken apart again, and
the result is written out in the parameter's type. In fp32, bits are those of torch's fused
optimizers. Knows nothing of models, of when an update is due, or of where memory comes from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from tightfit.bill.optimizers import BLOCK_8BIT, MIN_8BIT_VALUES
from tightfit.bill.shards import ceil_divide
from tightfit.engine.arithmetic import Arithmetic, Numbers, Wide
from tightfit.engine.companding import Root, Softsign
from tightfit.engine.moments import WORK_BUFFERS, Code, make_table
from tightfit.policies import Master

CHUNK_VALUES = 2**18  # a few fp32 buffers of it stay in a processor's L3 cache
REMAINDERS = {torch.int16: "remainder", torch.int8: "remainder_8"}
TREE, COMPANDED = "_scales", "_peaks"
SCALES = (TREE, COMPANDED)  # end the name of a moment's scales, and say what its codes mean
_DROPPED_BITS = 8  # of a master whose remainder has 8
_NEVER_NEGATIVE = ("exp_avg_sq",)


@dataclass
class Piece:
    """What an update needs of one parameter, or of a run of its values.

    All tensors but `step` are flat and contiguous, `[values]`, on the tier where the update runs.

    Attributes:
        weight: fp32, updated in place: the master, or the parameter itself. None with a split
            master, of which the upper half is `narrow`.
        gradient: fp32 or 16 bits; consumed.
        states: by name, as `Rule.states` has them; scales are `[blocks]`.
        step: fp32 scalar on the CPU or the device, which counts this step already. None where the
            rule does not count.
        narrow: the parameter's values, written at the end; it may be the very memory of a
            gradient whose type is as wide or wider. With a split master it is bf16, read before,
            and has memory of its own. None when `weight` is all there is.
    """

    weight: Tensor | None
    gradient: Tensor
    states: Mapping[str, Tensor]
    step: Tensor | None
    narrow: Tensor | None

    @property
    def values(self) -> int:
        """How many values of the parameter it has."""
        return self.gradient.numel()


@dataclass(frozen=True)
class Scratch:
    """Memory that updates work in, made once by `Rule.scratch`: flat fp32, empty where not needed.

    Attributes:
        chunk_values: most values at a time.
        gradient, weight: a chunk of what is kept in 16 bits, widened.
        moments: a chunk of each that is kept in 8 bits, dequantised.
        work: what the arithmetic, splitting and quantising use by turns.
        codes: of the 8-bit moments.
    """

    chunk_values: int
    gradient: Tensor
    weight: Tensor
    moments: Mapping[str, Tensor]
    work: Tensor
    codes: Mapping[str, Code]


class Rule:
    """How one optimizer updates pieces; made by `rule_of`.

    Args:
        arithmetic: the optimizer.
        scales: ends the names of scales, if the moments of large parameters are kept in 8 bits.
        master: split, if there is no fp32 master but a bf16 parameter and a remainder.
    """

    def __init__(self, arithmetic: Arithmetic, scales: str | None, master: Master) -> None:
        self._arithmetic = arithmetic
        self._quantised = () if scales is None else arithmetic.moments
        self._scales = scales or ""
        self._master = master

    @property
    def counts_steps(self) -> bool:
        """Whether a piece needs the number of the step."""
        return self._arithmetic.counts

    def states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, torch.dtype]]:
        """Tensors that a parameter of this shape needs, as (elements, type) by name.

        The step counter and an fp32 master are not among them; a split master's remainder is.
        """
        found: dict[str, tuple[int, torch.dtype]] = {}
        values = prod(shape)
        for name in self._arithmetic.moments:
            if name in self._quantised and values >= MIN_8BIT_VALUES:
                found[name] = (values, torch.uint8)
                found[name + self._scales] = (ceil_divide(values, BLOCK_8BIT), torch.float32)
            else:
                found[name] = (values, torch.float32)
        if self._master is not Master.FP32:
            short = self._master is Master.SPLIT_8 and len(shape) >= 2
            dtype = torch.int8 if short else torch.int16
            found[REMAINDERS[dtype]] = (values, dtype)
        return found

    def initialise(self, states: Mapping[str, Tensor]) -> None:
        """Fill fresh states in place: moments of 0, and masters that are what parameters are.

        Of 8-bit moments the scales are 0, so that no code stands for anything else.

        Args:
            states: by their names in `states`, of any shapes.
        """
        for state in states.values():
            state.zero_()

    def scratch_values(
        self, largest: int, gradient_type: torch.dtype, chunk_values: int = CHUNK_VALUES
    ) -> int:
        """fp32 values of scratch memory that updates need; 0 where all is done in place.

        Args:
            largest: values of the largest parameter.
            gradient_type: the narrowest of the gradients.
            chunk_values: most values at a time, a multiple of 256.
        """
        chunk = min(chunk_values, BLOCK_8BIT * ceil_divide(largest, BLOCK_8BIT))
        return chunk * sum(self._buffers(gradient_type))

    def scratch(self, memory: Tensor, gradient_type: torch.dtype) -> Scratch:
        """Divide `memory` up: fp32 `[scratch_values]`, on the tier where updates run.

        Makes tables of 65 KiB for each moment of bitsandbytes' 8 bits, on the same device.
        """
        buffers = self._buffers(gradient_type)
        chunk = memory.numel() // sum(buffers) if any(buffers) else CHUNK_VALUES
        gradient, weight, moments, work = memory.split([chunk * count for count in buffers])
        names = self._quantised
        codes = {name: _code(name, self._scales, memory.device) for name in names}
        by_name = dict(zip(names, moments.split(chunk), strict=False))
        return Scratch(chunk, gradient, weight, by_name, work, codes)

    def _buffers(self, gradient_type: torch.dtype) -> tuple[int, int, int, int]:
        """Chunks of scratch memory for gradient, weight, moments and work."""
        splits = int(self._master is not Master.FP32)
        work = max(splits, int(self._arithmetic.spare), WORK_BUFFERS if self._quantised else 0)
        return int(gradient_type is not torch.float32), splits, len(self._quantised), work

    @torch.no_grad()
    def update(
        self, pieces: Sequence[Piece], numbers: Numbers, clip: Tensor | None, scratch: Scratch
    ) -> None:
        """Apply one step of one group to `pieces`; allocates nothing of any size.

        Args:
            pieces: of any sizes.
            numbers: the group's.
            clip: what gradients are multiplied by, an fp32 scalar on the pieces' device.
            scratch: for no other thread meanwhile.
        """
        whole = [piece for piece in pieces if self._is_in_place(piece)]
        if whole:
            self._apply_whole(whole, numbers, clip)
        for piece in pieces:
            if not self._is_in_place(piece):
                for chunk in chunks(piece, scratch.chunk_values):
                    self._apply_chunk(chunk, numbers, clip, scratch)

    def _is_in_place(self, piece: Piece) -> bool:
        """Whether the arithmetic runs on the piece's own tensors and needs no others."""
        if piece.weight is None or piece.narrow is not None or self._arithmetic.spare:
            return False
        tensors = (piece.weight, piece.gradient, *piece.states.values())
        return all(tensor.dtype is torch.float32 for tensor in tensors)

    def _apply_whole(self, pieces: Sequence[Piece], numbers: Numbers, clip: Tensor | None) -> None:
        """All pieces at once, as torch's optimizers do."""
        gradients = [piece.gradient for piece in pieces]
        if clip is not None:
            torch._foreach_mul_(gradients, clip)
        names = self._arithmetic.moments
        moments = [[piece.states[name] for piece in pieces] for name in names]
        weights = [piece.weight for piece in pieces if piece.weight is not None]
        steps = [piece.step for piece in pieces if piece.step is not None]
        self._arithmetic.apply(Wide(weights, gradients, moments, steps), numbers, None)

    def _apply_chunk(
        self, piece: Piece, numbers: Numbers, clip: Tensor | None, scratch: Scratch
    ) -> None:
        """Widen what is narrow, apply, make narrow again what was."""
        gradient = piece.gradient
        if gradient.dtype is not torch.float32:
            gradient = scratch.gradient[: piece.values].copy_(gradient)
        if clip is not None:
            gradient.mul_(clip)
        weight = self.weight_of(piece, scratch)
        moments = [self._moment(piece, name, scratch) for name in self._arithmetic.moments]
        steps = [] if piece.step is None else [piece.step]
        wide = Wide([weight], [gradient], [[moment] for moment in moments], steps)
        self._arithmetic.apply(wide, numbers, scratch.work)
        for name, moment in zip(self._arithmetic.moments, moments, strict=True):
            self._keep_moment(piece, name, moment, scratch)
        self.keep_weight(piece, weight, scratch)

    def weight_of(self, piece: Piece, scratch: Scratch) -> Tensor:
        """The master itself, or put together from its halves."""
        if piece.weight is not None:
            return piece.weight
        assert piece.narrow is not None
        weight, remainder = scratch.weight[: piece.values].copy_(piece.narrow), _remainder(piece)
        low = scratch.work[: piece.values].view(torch.int32).copy_(remainder)
        if remainder.dtype is torch.int8:
            low.bitwise_left_shift_(_DROPPED_BITS)
        weight.view(torch.int32).add_(low)
        return weight

    def keep_weight(self, piece: Piece, weight: Tensor, scratch: Scratch) -> None:
        """Write the parameter, and what it lacks of a split master.

        The remainder is the lower 16 bits as a signed number, or the upper 8 of these, to which the
        master is rounded: by 2^-16 of its size at most. Without it the upper bits are the master
        rounded to bf16, half away from zero.
        """
        if piece.weight is None:
            bits, remainder = weight.view(torch.int32), _remainder(piece)
            if remainder.dtype is torch.int8:
                bits.add_(1 << (_DROPPED_BITS - 1)).bitwise_right_shift_(_DROPPED_BITS)
            remainder.copy_(bits)
            bits.sub_(scratch.work[: piece.values].view(torch.int32).copy_(remainder))
            if remainder.dtype is torch.int8:
                bits.bitwise_left_shift_(_DROPPED_BITS)
        if piece.narrow is not None:
            piece.narrow.copy_(weight)

    def _moment(self, piece: Piece, name: str, scratch: Scratch) -> Tensor:
        """A moment itself, or dequantised."""
        moment = piece.states[name]
        if moment.dtype is torch.float32:
            return moment
        wide = scratch.moments[name][: piece.values]
        scratch.codes[name].widen(moment, piece.states[name + self._scales], wide, scratch.work)
        return wide

    def _keep_moment(self, piece: Piece, name: str, wide: Tensor, scratch: Scratch) -> None:
        """Quantise a moment that is kept in 8 bits."""
        moment = piece.states[name]
        if moment is not wide:
            scales = piece.states[name + self._scales]
            scratch.codes[name].narrow(wide, moment, scales, scratch.work)


def scales_of(name: str, states: Collection[str]) -> str | None:
    """The name of a moment's scales, if it has any.

    Args:
        name: of the moment.
        states: names of all states of its parameter.
    """
    return next((name + scales for scales in SCALES if name + scales in states), None)


def widened(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """The fp32 values `[values]` of an 8-bit moment.

    Args:
        name: of its scales.
    """
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    work = values.new_empty(WORK_BUFFERS * values.numel())
    _code_of(name, codes.device).widen(codes.view(-1), scales, values, work)
    return values


def narrowed(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of an 8-bit moment; the fp32 `values` are overwritten.

    Of values that `widened` gave, in the same blocks, they are those that it was given.

    Args:
        name: of its scales.
    """
    codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
    scales = values.new_empty(ceil_divide(values.numel(), BLOCK_8BIT))
    work = values.new_empty(WORK_BUFFERS * values.numel())
    _code_of(name, values.device).narrow(values.view(-1), codes, scales, work)
    return codes, scales


def chunks(piece: Piece, values: int = CHUNK_VALUES) -> Iterator[Piece]:
    """The piece in runs of `values`, a multiple of 256; the last may be shorter, none is empty.

    Of a fake piece the first, as a dry run learns nothing from those like it.
    """
    assert values % BLOCK_8BIT == 0, "a run ends where a block of 8-bit moments ends"
    end = piece.values if detect_fake_mode() is None else min(values, piece.values)
    for first in range(0, end, values):
        yield run_of(piece, first, min(first + values, piece.values))


def run_of(piece: Piece, first: int, last: int) -> Piece:
    """The values `[first, last)` of a piece; `first` is a multiple of 256, and so is `last` but at
    the end."""
    blocks = slice(first // BLOCK_8BIT, ceil_divide(last, BLOCK_8BIT))
    return Piece(
        None if piece.weight is None else piece.weight[first:last],
        piece.gradient[first:last],
        {
            name: state[blocks] if name.endswith(SCALES) else state[first:last]
            for name, state in piece.states.items()
        },
        piece.step,
        None if piece.narrow is None else piece.narrow[first:last],
    )


def _remainder(piece: Piece) -> Tensor:
    """What a parameter lacks of its split master."""
    return next(piece.states[name] for name in REMAINDERS.values() if name in piece.states)


def _code_of(scales: str, device: torch.device) -> Code:
    """What the codes mean whose scales have that name."""
    ending = next(ending for ending in SCALES if scales.endswith(ending))
    return _code(scales.removesuffix(ending), ending, device)


def _code(name: str, ending: str, device: torch.device) -> Code:
    """What the codes of a moment mean, by its name and the end of that of its scales."""
    signed = name not in _NEVER_NEGATIVE
    if ending == COMPANDED:
        return Softsign() if signed else Root()
    return make_table(device, signed=signed)
