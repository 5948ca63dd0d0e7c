"""lit_callbacks: Lightning callbacks that show and watch training stages.

They need Lightning and torch only and know a module by the keys that it logs.
"""

from lit_callbacks.progress import StageProgressBar

__version__ = "0.1.0"

__all__ = ["StageProgressBar"]
