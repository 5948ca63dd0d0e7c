"""Words that options accept. Importing this module imports no library."""

from typing import Literal

Criterion = Literal["helpful", "harmless"]
"""What a judge compares responses by."""
DType = Literal["float32", "bfloat16", "float16"]
"""Data type of a model's weights."""
HeadFormat = Literal["transformers", "openrlhf", "trl"]
"""How the weights of a scalar head are named in a model's folder."""
NetworkName = Literal["policy", "critic", "reward", "model"]
"""Networks that a checkpoint or a model's folder may hold."""
OnBadRecord = Literal["error", "skip"]
"""What to do about a record that cannot be used."""
