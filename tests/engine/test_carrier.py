"""In which order a card gets what comes from the disk; what comes is in test_disk_parameters.py."""

from __future__ import annotations

import pytest
import torch
from tests.engine.test_transfer import Card

from tightfit.engine.carrier import _Gate


def test_a_card_copies_after_what_it_was_given_when_the_fetch_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not after what it is given meanwhile."""
    card = Card()
    for name, stand_in in {
        "Stream": card.make_stream,
        "Event": lambda: Card.Event(card),
        "current_stream": lambda device: card.current,
        "stream": card.stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    gate = _Gate(torch.device("cuda"))
    begun = gate.open()
    with gate.after(begun):
        copying = card.current
    assert (copying.number, card.current.number) == (1, 0)
    assert card.log == ["event 1 on 0", "1 after event 1"]
    assert _Gate(torch.device("cpu")).open() is None
