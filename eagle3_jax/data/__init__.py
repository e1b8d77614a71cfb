"""From raw conversations to training rows: read, mask, pack, order. Each file holds one of these steps."""

from eagle3_jax.data.conversations import Conversation, ConversationError, DataError, load_conversations, parse_record
from eagle3_jax.data.template_masks import Example, encode_conversation, encode_turns

__all__ = [
    "Conversation",
    "ConversationError",
    "DataError",
    "Example",
    "encode_conversation",
    "encode_turns",
    "load_conversations",
    "parse_record",
]
