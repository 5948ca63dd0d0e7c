"""A chat with one or more models in the terminal."""

from lit_rlhf.evaluation.chat.chat import HELP, Answer, Chat, Speaker, load_speakers
from lit_rlhf.evaluation.chat.streaming import StreamedResponse, stream_response

__all__ = [
    "HELP",
    "Answer",
    "Chat",
    "Speaker",
    "StreamedResponse",
    "load_speakers",
    "stream_response",
]
