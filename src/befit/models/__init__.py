"""Backbones: pre-trained transformers models, found, loaded from safetensors, frozen and fingerprinted."""

from befit.models.backbone import LoadedBackbone, load_backbone, load_shapes, skeleton

__all__ = ["LoadedBackbone", "load_backbone", "load_shapes", "skeleton"]
