"""Chat with one or more models in the terminal, as `lit_rlhf generate --chat` does."""

from lit_rlhf.tools.evaluation.chat.chat import HELP, Chat, Speaker, load_speakers
from lit_rlhf.tools.evaluation.chat.display import show_replies
from lit_rlhf.tools.evaluation.chat.streaming import ChatReply, stream_reply

__all__ = [
    "HELP",
    "Chat",
    "ChatReply",
    "Speaker",
    "load_speakers",
    "show_replies",
    "stream_reply",
]
