"""From raw conversations to training rows: read, mask, keep on disk, pack, order. Each file holds one of these steps."""

from eagle3_jax.data.bulk import BRACKETS, GREEN, Report, encode_all, mark_responses
from eagle3_jax.data.conversations import FORMATS, Conversation, ConversationError, load_conversations, parse_record, questions
from eagle3_jax.data.order import Stream, order, process_share
from eagle3_jax.data.packing import Rows, fill_rows, pack
from eagle3_jax.data.pipeline import draft_vocab, prepare, show
from eagle3_jax.data.prepared import PreparedData, load_prepared, save_prepared
from eagle3_jax.data.sources import PRESETS, DataError, read_records
from eagle3_jax.data.template_masks import Example, encode_conversation, encode_turns

__all__ = [
    "BRACKETS",
    "FORMATS",
    "GREEN",
    "PRESETS",
    "Conversation",
    "ConversationError",
    "DataError",
    "Example",
    "PreparedData",
    "Report",
    "Rows",
    "Stream",
    "draft_vocab",
    "encode_all",
    "encode_conversation",
    "encode_turns",
    "fill_rows",
    "load_conversations",
    "load_prepared",
    "mark_responses",
    "order",
    "pack",
    "parse_record",
    "prepare",
    "process_share",
    "questions",
    "read_records",
    "save_prepared",
    "show",
]
