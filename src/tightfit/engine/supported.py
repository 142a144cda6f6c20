"""What policies can say and the engine cannot do yet; a technique leaves the list when it is in."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.errors import UnsupportedError
from tightfit.policies import OptimizerName, Policies


def engine_lacks(policies: Policies) -> Iterator[str]:
    """Each technique of `policies` that is missing, in the words of the job's keys."""
    if policies.optimizer.name is OptimizerName.ADAFACTOR:
        yield f"optim {policies.optimizer.name}"
    if policies.quantisation is not None and policies.quantisation.bits != 4:
        yield f"quantization_bit {policies.quantisation.bits}"


def check_engine_can(policies: Policies) -> None:
    """See that the engine can apply all of `policies`.

    Raises:
        UnsupportedError: it cannot yet.
    """
    missing = list(engine_lacks(policies))
    if missing:
        raise UnsupportedError(
            f"not available in training yet: {', '.join(missing)}; leave it out "
            "(`tightfit estimate` prices it)"
        )
