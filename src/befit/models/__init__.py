"""Backbones: pre-trained transformers models, found, loaded from safetensors, frozen and fingerprinted."""

from befit.models.backbone import Backbone, load_backbone, load_shapes, skeleton

__all__ = ["Backbone", "load_backbone", "load_shapes", "skeleton"]
