"""One basis for several backbones: the frozen factors of PQ-LoRA aligned on public data, before any training."""

__all__: list[str] = []
