"""The factor on a loss that keeps gradients in fp16 from vanishing, and how it follows overflows.

fp16 has no number between 0 and 6e-8, where many gradients are, so backward begins with the loss
times a power of two, which the update divides by again (https://arxiv.org/abs/1710.03740). A step
whose gradients overflow is skipped. The names and what they mean are those of DeepSpeed's `fp16`:
of overflows the first `hysteresis - 1` change nothing, each further one halves the scale;
`window` steps in a row without one double it and forgive what there was. Knows nothing of
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.policies import LossScalePolicy

_FACTOR = 2.0


class LossScale:
    """The scale of one run.

    Attributes:
        value: of the next backward.
    """

    def __init__(self, policy: LossScalePolicy) -> None:
        self._policy = policy
        self.value = policy.static or 2.0**policy.initial_power
        self._hysteresis = policy.hysteresis
        self._steps = 0  # in a row that did not overflow

    @property
    def is_lowest(self) -> bool:
        """Whether an overflow cannot lower it any more: then something else is wrong."""
        return bool(self._policy.static) or self.value <= self._policy.minimum

    def after_step(self, *, finite: bool) -> None:
        """Follow a step, whose gradients were finite, or which was skipped."""
        if self._policy.static:
            return
        if finite:
            self._steps += 1
            if self._steps % self._policy.window == 0:
                self._hysteresis = self._policy.hysteresis
                self.value *= _FACTOR
            return
        self._steps = 0
        if self._hysteresis > 1:
            self._hysteresis -= 1
        else:
            self.value = max(self.value / _FACTOR, self._policy.minimum)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "hysteresis": self._hysteresis, "steps": self._steps}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from what a checkpoint has kept; a static scale stays what the job says."""
        if not self._policy.static:
            self.value = float(state["value"])
            self._hysteresis = int(state["hysteresis"])
            self._steps = int(state["steps"])
