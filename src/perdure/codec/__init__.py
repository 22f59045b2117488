"""Values and exceptions as JSON bytes, and back without loss."""

from perdure.codec.failures import dump_error
from perdure.codec.hints import register
from perdure.codec.losses import Loss, tree_of
from perdure.codec.readable import readable
from perdure.codec.rebuilt_errors import load_error
from perdure.codec.values import Codec

__all__ = ["Codec", "Loss", "dump_error", "load_error", "readable", "register", "tree_of"]
