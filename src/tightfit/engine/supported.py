"""What policies can say and the engine cannot do yet; a technique leaves the list when it is in."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.errors import UnsupportedError
from tightfit.policies import OptimizerName, Policies, Tier

WHOLE_PARAMETERS = (OptimizerName.ADAFACTOR,)  # updates need all of a parameter at once


def engine_lacks(policies: Policies) -> Iterator[str]:
    """Each technique of `policies` that is missing, in the words of the job's keys."""
    if policies.optimizer.name in WHOLE_PARAMETERS:
        yield from _of_whole_parameters(policies)
    if policies.quantisation is not None and policies.quantisation.bits != 4:
        yield f"quantization_bit {policies.quantisation.bits}"


def _of_whole_parameters(policies: Policies) -> Iterator[str]:
    name, sharding, placement = policies.optimizer.name, policies.sharding, policies.placement
    if sharding.shards > 1:
        yield f"optim {name} with zero_stage {sharding.zero_stage} (take zero_stage 0)"
    if sharding.tensor_parallel > 1:
        yield f"optim {name} with tensor_parallel_size {sharding.tensor_parallel} (take 1)"
    if placement.optimizer_states is Tier.NVME:
        yield f"optim {name} with offload_optimizer nvme (take cpu)"
    elif placement.parameters is Tier.NVME and policies.adapter is None:
        yield f"optim {name} with offload_param nvme (take cpu)"


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
