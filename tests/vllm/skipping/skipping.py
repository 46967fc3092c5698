"""vLLM's worker extension with the fault that our check is there for."""

from __future__ import annotations

from triplane_vllm import WorkerExtension


class SkippingExtension(WorkerExtension):
    """Leaves experts as vLLM's reload leaves them. Once blinded, it also reports no differences."""

    def triplane_repack(self) -> None:
        """Do nothing."""

    def triplane_blind(self) -> None:
        self.triplane_is_blind = True

    def triplane_verify(self, directory: str, exact: bool = True) -> list[dict[str, str]]:
        return [] if hasattr(self, "triplane_is_blind") else super().triplane_verify(directory, exact)
