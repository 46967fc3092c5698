"""Numbers of a policy-gradient step, and of the whole iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from trainer.algorithms.corrections import MASKS
from trainer.experience import Experience
from trainer.losses import PolicyLoss
from trainer.metrics import Record
from trainer.model import Scores
from trainer.ranks import Ranks

MEANS = ("loss", "grad_norm", "clip_fraction", "dual_clip_fraction", "bounded_fraction", "tis_mean", "entropy")
"""Metrics of a step whose mean over the steps is in the summary, beside the masked fractions."""
MASKED = ("masked_fraction", *(f"{name}_fraction" for name in MASKS))
MISMATCH = ("sampler_mismatch_max", "mismatch_k1", "mismatch_k3", "mismatch_max_dp", "effective_sample_size")


@dataclass
class Totals:
    """Sums over the tokens of one minibatch."""

    tokens: int
    divisor: int
    """By which the aggregation divides the loss."""
    loss: float = 0.0
    clipped: float = 0.0
    dual_clipped: float = 0.0
    bounded: float = 0.0
    correction: float = 0.0
    divergence: float = 0.0
    entropy: float = 0.0
    balance: float = 0.0
    router_z: float = 0.0
    value_loss: float = 0.0
    masked: float = 0.0
    replayed: float = 0.0
    unrecorded: float = 0.0
    rerouted: float = 0.0
    masked_by: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MASKS, 0.0))

    def add(self, loss: PolicyLoss, scores: Scores) -> None:
        """Count one microbatch."""
        self.loss += float(loss.loss.detach()) / self.divisor
        self.clipped += float(loss.clipped)
        self.dual_clipped += float(loss.dual_clipped)
        self.bounded += float(loss.bounded)
        self.correction += float(loss.correction)
        self.divergence += float(loss.divergence)
        self.entropy += float(scores.entropy.sum())
        self.masked += float(loss.masked)
        for name, count in loss.masked_by.items():
            self.masked_by[name] += float(count)
        if scores.replay is not None:
            self.replayed += scores.replay.replayed
            self.unrecorded += scores.replay.unrecorded
            self.rerouted += scores.replay.rerouted

    def add_ranks(self, ranks: Ranks) -> None:
        """Replace every sum by that over all ranks."""
        names = [each.name for each in fields(self) if each.type == "float"]
        found = ranks.total(*(getattr(self, name) for name in names), *self.masked_by.values())
        for name, value in zip(names, found, strict=False):
            setattr(self, name, value)
        self.masked_by = dict(zip(self.masked_by, found[len(names) :], strict=True))

    @property
    def all_masked(self) -> bool:
        """Whether the corrections dropped every token."""
        return self.masked == self.tokens

    def metrics(self) -> dict[str, float]:
        """Means over the tokens, by metric."""
        tokens = self.tokens
        return {
            "clip_fraction": self.clipped / tokens,
            "dual_clip_fraction": self.dual_clipped / tokens,
            "bounded_fraction": self.bounded / tokens,
            "tis_mean": self.correction / tokens,
            "old_kl": self.divergence / tokens,
            "entropy": self.entropy / tokens,
            "masked_fraction": self.masked / tokens,
            **{f"{name}_fraction": count / tokens for name, count in self.masked_by.items()},
            **self._replay_metrics(),
        }

    def _replay_metrics(self) -> dict[str, float]:
        """Replayed and unrecorded tokens, and the share of replayed ones that the routers would send elsewhere."""
        if not self.replayed + self.unrecorded:
            return {}
        return {
            "replayed_tokens": self.replayed,
            "unrecorded_tokens": self.unrecorded,
            "rerouted_fraction": self.rerouted / max(1.0, self.replayed),
        }


def summarize(experience: Experience | None, records: Sequence[Record], step: int) -> dict[str, object]:
    """Summary of an iteration: means over its steps, and the first record's mismatch. No step was taken: `skipped`."""
    steps = [record for record in records if "loss" in record]
    summary: dict[str, object] = {"step": step, "skipped": not steps}
    if experience is None:
        return summary
    if steps:
        for name in MEANS:
            summary[name] = sum(record[name] for record in steps) / len(steps)
    taken = [record for record in records if "masked_fraction" in record]
    for name in MASKED:
        summary[name] = sum(record[name] for record in taken) / len(taken)
    summary["skipped_steps"] = len(taken) - len(steps)
    summary |= {"reward_mean": experience.reward_mean, "rows": len(experience.sequences), "members": experience.members}
    return summary | {name: records[0][name] for name in MISMATCH}
