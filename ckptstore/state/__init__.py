"""The user's nested state <-> named tensor slices and plain values.

``capture`` at a save, ``template`` at a load; between them stand the names, boxes and encodings of the format.
"""

from ckptstore.state.capture import Captured, TensorSlice, ValueSlice, capture, no_garbage_collection
from ckptstore.state.catalog import Catalog, Target, TensorInfo
from ckptstore.state.markers import PerRank, Rank0, Sharded
from ckptstore.state.restore import Restore, template

__all__ = [
    "Captured",
    "Catalog",
    "PerRank",
    "Rank0",
    "Restore",
    "Sharded",
    "Target",
    "TensorInfo",
    "TensorSlice",
    "ValueSlice",
    "capture",
    "no_garbage_collection",
    "template",
]
