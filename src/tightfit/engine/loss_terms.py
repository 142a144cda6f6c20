"""What a loss has beside the cross-entropy of each token while it is trained.

With logits l of a vocabulary of V, their normaliser Z = log sum exp l and a target t, the loss of a
token is

    Z - (1 - s) l[t] - s mean(l) + z Z^2

and its gradient (1 + 2 z Z) softmax(l) - (1 - s) [target] - s / V: label smoothing s
(https://arxiv.org/abs/1512.00567, section 7) and z-loss z, which keeps normalisers near 0
(https://arxiv.org/abs/2204.02311, section 5). Knows nothing of how logits are made or divided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightfit.policies import LossPolicy


@dataclass(frozen=True)
class LossTerms:
    """Both, none by default.

    Attributes:
        rows: of the whole vocabulary.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    rows: int = 1

    @classmethod
    def of(cls, policy: LossPolicy, head: torch.nn.Module) -> LossTerms:
        """Those of `policy` for an output layer, `[vocab, hidden]`, which ranks may share."""
        if not policy.has_terms:
            return NO_TERMS
        weight = head.weight
        assert isinstance(weight, torch.Tensor)
        return cls(policy.label_smoothing, policy.z_loss, weight.shape[0])

    def trained(self) -> LossTerms:
        """These while gradients are made; evaluation is of cross-entropy alone."""
        return self if torch.is_grad_enabled() else NO_TERMS

    def sum_of(self, logits: torch.Tensor) -> torch.Tensor:
        """What these logits, `[tokens, some rows]`, give to the mean of each token's."""
        if not self.label_smoothing:
            return logits.new_zeros(logits.shape[0])
        return logits.sum(dim=1) / self.rows

    def added(
        self, normaliser: torch.Tensor, at_target: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        """What is added to each token's cross-entropy, `[tokens]`.

        Args:
            normaliser: of whole logits.
            at_target, mean: of logits, or of logits less the same number.
        """
        return self.label_smoothing * (at_target - mean) + self.z_loss * normaliser.square()

    def scaled(self, probabilities: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """What of the gradient goes with probabilities, `[tokens, some rows]`, in place."""
        if self.z_loss:
            probabilities *= (1 + 2 * self.z_loss * normaliser).unsqueeze(1)
        return probabilities

    def subtract_targets(
        self, gradients: torch.Tensor, inside: torch.Tensor, index: torch.Tensor
    ) -> None:
        """Take the other parts from the gradients of some rows' logits, in place.

        Args:
            inside: `[tokens]`, whether the target is among these rows.
            index: and where.
        """
        here = -inside.to(gradients.dtype).unsqueeze(1) * (1 - self.label_smoothing)
        gradients.scatter_add_(1, index.unsqueeze(1), here)
        if self.label_smoothing:
            gradients -= self.label_smoothing / self.rows


NO_TERMS = LossTerms()
