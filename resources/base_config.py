"""The `base` section of an experiment: the policy before its first iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from curation.mixture.config import Source
from curation.tasks.demonstrations import DemonstrationConfig
from resources.section import Section
from trainer.config import LoraConfig, SftConfig
from trainer.model_config import ModelConfig


class Original(Section):
    """An existing directory in the Hugging Face layout: Qwen3-MoE, Qwen3 or Llama in bfloat16, float32 or FP8 blocks,
    with a tokenizer that has Qwen's chat tokens.
    """

    path: str = Field(min_length=1)
    """Path of the directory on the machine that materializes base_policy."""
    spaced: bool = True
    """Whether tool calls are written with blanks and newlines, as Qwen writes them."""

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return Path(self.path)


class ImportedBase(Original):
    """Base policy: an existing directory in the Hugging Face layout: Qwen3-MoE, Qwen3 or Llama in bfloat16, float32 or
    FP8 blocks, with a tokenizer that has Qwen's chat tokens.
    """

    kind: Literal["import"]
    """Selects this kind of base policy."""

    @property
    def original(self) -> Original:
        """The imported model."""
        return self


class SftBase(Section):
    """Base policy: a fresh or an imported model, trained on scripted expert episodes or on a mixture."""

    kind: Literal["sft"] = "sft"
    """Selects this kind of base policy."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """The expert episodes."""
    mixture: tuple[Source, ...] = ()
    """Sources to train on, drawn by weight. The stopping criterion scores rows of the first one. Empty: the expert
    episodes alone.
    """
    start: Original | None = None
    """Imported model to train; null: a fresh one."""
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights of `start`, at `sft.adamw_learning_rate`; null: all weights."""
    model: ModelConfig = ModelConfig()
    """Shape of a fresh model."""
    sft: SftConfig = SftConfig()
    """Training recipe and stopping criterion."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        names = [each.called for each in self.mixture]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"mixture has two sources called {twice}: give each a name of its own")
        if self.mixture and "demonstrations" in self.model_fields_set and not self.scripted:
            raise ValueError("demonstrations has no effect without a source of kind scripted: add one, or leave it out")
        if self.start is not None and "model" in self.model_fields_set:
            raise ValueError("model is the shape of a fresh model, but start names one: leave model out")
        if self.start is None and self.lora is not None:
            raise ValueError("lora adapts the weights of an imported model: set start, or leave it out")
        return self

    @property
    def scripted(self) -> bool:
        """Whether the expert episodes are trained on."""
        return not self.mixture or any(each.kind == "scripted" for each in self.mixture)

    @property
    def plain(self) -> bool:
        """Whether a fresh model is trained on the expert episodes alone."""
        return not self.mixture and self.start is None

    @property
    def original(self) -> Original | None:
        """The imported model that is trained; None: a fresh one."""
        return self.start

    @property
    def spaced(self) -> bool:
        """Whether tool calls are written with blanks and newlines, as Qwen writes them."""
        return self.start is not None and self.start.spaced
