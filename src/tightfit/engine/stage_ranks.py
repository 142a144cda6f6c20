"""Ranks that each have some of the layers, beside those that share their stage.

Knows nothing of models or of what stages send each other in forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.clipping import Gradients
from tightfit.engine.ranks import BesideDataRanks, Ranks, square_over
from tightfit.ledger import local_part
from tightfit.units import MIB

_PIECE_BYTES = 16 * MIB


class StageRanks(BesideDataRanks):
    """One rank of each stage; see `Ranks`.

    Args:
        data: those of this rank's stage.
        group: the rank of each stage that has this rank's place in it, in the order of stages.
        copies: parameters that an earlier stage has too, whose gradients are the same.
        device: where numbers can be summed.
    """

    def __init__(
        self,
        data: Ranks,
        group: dist.ProcessGroup,
        copies: frozenset[nn.Parameter],
        device: torch.device,
    ) -> None:
        super().__init__(data, group, device)
        self.copies = copies

    def global_norm(
        self, gradients: Gradients, known: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """Stages are added up; what two of them have is counted once."""
        counted = {p: g for p, g in gradients.items() if p not in self.copies}
        norm = self._data.global_norm(counted, known)
        square = square_over(norm, self._group, self._device)
        return square.sqrt().to(norm.device, norm.dtype)


def add_up_with(
    peer: int, gradient: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Make a gradient the sum of this rank's and of another stage's, in place; both call it.

    A piece at a time travels, so that it takes little memory.

    Args:
        peer: the other's number in `group`.
        gradient: this rank's part, on the device or on the host.
        device: where values can be sent from.
    """
    flat = local_part(gradient).view(-1)
    for piece in flat.split(_PIECE_BYTES // flat.element_size()):
        with ledger.labelled(Kind.COLLECTIVES):
            own = piece.to(device)
            other = torch.empty_like(own)
        swap(group, [(peer, own)], [(peer, other)])
        # The same order on both, so that both have the same bits.
        first, second = (own, other) if group.rank() < peer else (other, own)
        piece.copy_(first + second)


def swap(
    group: dist.ProcessGroup,
    sent: list[tuple[int, torch.Tensor]],
    received: list[tuple[int, torch.Tensor]],
) -> None:
    """Send tensors to others of a group and receive into tensors, all at once; returns when done.

    At once, since on cards two ranks that send to each other before they receive wait for ever.
    """
    operations = [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sent]
    operations += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in received]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
