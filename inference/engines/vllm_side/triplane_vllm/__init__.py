"""Replace the weights of a running vLLM worker, and prove that they are those of a checkpoint.

/collective_rpc triplane_load(directory, mark)  reload.py: what vLLM's own reload leaves stale on a CPU is redone
/collective_rpc triplane_loaded()               whose update the weights are of
/collective_rpc triplane_verify(directory)      verify.py: every parameter and every layer's output, against
                                                checkpoint.py
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .guarded import end_with_guard
from .reload import renew_head, repack_experts
from .verify import differences

end_with_guard()


class WorkerExtension:
    """Methods that vLLM mixes into its worker. Their names must not clash with the worker's."""

    triplane_mark = ""

    def triplane_load(self, directory: str, mark: str = "") -> None:
        """Serve the checkpoint in `directory`.

        Requires a paused worker. mark: of the update, for triplane_loaded.
        """
        self.triplane_mark = mark
        self.reload_weights(weights_path=directory)  # type: ignore[attr-defined]  # vLLM's
        renew_head(self.triplane_model())
        self.triplane_repack()

    def triplane_loaded(self) -> str:
        """Mark of the last triplane_load, even an unfinished one; "" for the initial weights."""
        return self.triplane_mark

    def triplane_repack(self) -> None:
        """Repack the experts in the order that their kernel reads."""
        repack_experts(self.triplane_model())

    def triplane_verify(self, directory: str, exact: bool = True) -> list[dict[str, str]]:
        """Differences between served weights and checkpoint: [{"name": "layer 1: experts.w13", "detail": ...}]; empty
        if there are none.
        """
        return [
            {"name": name, "detail": detail} for name, detail in differences(self.triplane_model(), directory, exact)
        ]

    def triplane_model(self) -> nn.Module:
        """The worker's model."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # vLLM's
        model: nn.Module = runner.get_model()
        return model
