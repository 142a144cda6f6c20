"""A config and the one that it points to, as one reading."""

from __future__ import annotations

from dataclasses import replace

from tightfit.errors import ConfigError
from tightfit.interop.entries import shown
from tightfit.interop.reading import Reading


def joined(outer: Reading, inner: Reading) -> Reading:
    """Both; what either says wins over what the other means by saying nothing.

    Raises:
        ConfigError: they contradict.
    """
    for name in sorted(outer.keys.keys() & inner.keys.keys()):
        ours, theirs = outer.keys[name], inner.keys[name]
        if ours != theirs:
            raise ConfigError(
                f"{outer.places[name]} and {inner.places[name]} contradict: they make {name} "
                f"{shown(ours)} and {shown(theirs)}; keep one"
            )
    return replace(
        outer,
        keys={**outer.keys, **inner.keys},
        implied={**outer.implied, **inner.implied},
        places={**outer.places, **inner.places},
        notes=(*outer.notes, *inner.notes),
        tool=inner.tool,
    )
