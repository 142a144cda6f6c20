"""Probes kept on disk: one file for each machine under `$TIGHTFIT_CACHE`.

A folder may be shared by many machines, so the file's name is made of the processor and the cards;
what must be the same besides is compared when it is read. What cannot be read is as good as not
there, with a note.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path

import torch

from tightfit.dry_run.cache import cache_folder
from tightfit.facts.hardware import Hardware
from tightfit.facts.processors import cpu_quota
from tightfit.planner.probe.figures import ADAPTER, Identity, Probe

ADVICE = "run `tightfit probe` for better step times"


def identity_of(hardware: Hardware) -> Identity:
    """What a probe of this machine is known by."""
    return Identity(
        cpu=hardware.cpu_name,
        processors=os.cpu_count() or 1,
        quota=cpu_quota(),
        cards=tuple(sorted(card.uuid for card in hardware.accelerators)),
        driver=hardware.driver,
        torch=torch.__version__,
    )


def file_of(identity: Identity) -> Path:
    """Where the probe of such a machine is."""
    machine = json.dumps([identity.cpu, identity.processors, identity.quota, identity.cards])
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return cache_folder() / "probes" / f"{digest}.json"


def write_probe(probe: Probe) -> Path:
    """Keep a probe in the place of the last one, whole or not at all; where.

    Raises:
        OSError: it cannot be written there.
    """
    path = file_of(probe.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(ADAPTER.dump_json(probe, indent=1))
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    return path


def read_probe(identity: Identity) -> tuple[Probe | None, str | None]:
    """The probe of this machine, or why there is none: no sentence where nobody has made one."""
    path = file_of(identity)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"the probe in {path} cannot be read ({error.strerror})"
    try:
        probe = ADAPTER.validate_json(content)
    except ValueError:
        return None, f"the probe in {path} is of another version of tightfit, or broken"
    changed = [
        f"{field.name} {getattr(probe.identity, field.name)}, now {getattr(identity, field.name)}"
        for field in fields(Identity)
        if getattr(probe.identity, field.name) != getattr(identity, field.name)
    ]
    if changed:
        return None, f"the probe is of another machine: {'; '.join(changed)}"
    return probe, None
