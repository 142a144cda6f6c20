"""Which rule an optimizer's policy means. Knows nothing of how rules update."""

from __future__ import annotations

from tightfit.engine.arithmetic import ARITHMETIC
from tightfit.engine.factored import Factored
from tightfit.engine.rules import COMPANDED, TREE, Rule
from tightfit.policies import OptimizerName, OptimizerPolicy

_SCALES = {
    OptimizerName.ADAMW_8BIT: TREE,
    OptimizerName.LION_8BIT: TREE,
    OptimizerName.ADAMW_COMPACT: COMPANDED,
}


def rule_of(policy: OptimizerPolicy) -> Rule:
    """The rule of a policy."""
    if policy.name is OptimizerName.ADAFACTOR:
        return Factored(policy.master)
    return Rule(ARITHMETIC[policy.name], _SCALES.get(policy.name), policy.master)
