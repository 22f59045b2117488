"""Values and exceptions as JSON bytes, and back without loss."""

from perdure.codec.failures import dump_error, load_error, rebuildable
from perdure.codec.hints import register
from perdure.codec.losses import Loss, tree_of
from perdure.codec.values import Codec

__all__ = ["Codec", "Loss", "dump_error", "load_error", "rebuildable", "register", "tree_of"]
