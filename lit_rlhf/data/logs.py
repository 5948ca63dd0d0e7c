"""Log messages that one process speaks for all ranks."""

import logging

from lightning.pytorch.utilities import rank_zero_only


def log_on_rank_zero(logger: logging.Logger, level: int, message: str) -> None:
    """Log a message on the first rank, or where there are no ranks.

    Args:
        logger: Where to.
        level: A level of :mod:`logging`.
        message: The message.
    """
    if getattr(rank_zero_only, "rank", None) in (0, None):
        logger.log(level, message)
