import math


def nothing(prompts: list[str], responses: list[str]) -> list[float]:
    """No score for any response."""
    return [math.nan] * len(responses)
