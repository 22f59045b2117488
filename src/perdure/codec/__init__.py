"""Values and exceptions as JSON bytes, and back without loss."""

from perdure.codec.failures import dump_error, is_rebuildable, load_error
from perdure.codec.hints import register
from perdure.codec.losses import Loss, tree_of
from perdure.codec.readable import readable
from perdure.codec.values import Codec

__all__ = ["Codec", "Loss", "dump_error", "is_rebuildable", "load_error", "readable", "register", "tree_of"]
