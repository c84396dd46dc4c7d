"""From files to packed batches: read, normalise, render, cut, pack. Torch-free."""

from swiftkit.data.answers import AnswerBatch, AnswerRow, collate_answers
from swiftkit.data.batch import PackedBatch, collate
from swiftkit.data.conversation import Conversation, Message
from swiftkit.data.document import Document, Origin, RowError
from swiftkit.data.lines import Row
from swiftkit.data.order import num_steps, windows_of_run, windows_of_step
from swiftkit.data.pack import pack
from swiftkit.data.pairs import Pairs, prepare_pairs
from swiftkit.data.prepare import Prepared, prepare
from swiftkit.data.read import read
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport
from swiftkit.data.shapes import Completion, PlainText, to_example
from swiftkit.data.template import ChatTemplate, resolve_chat_template
from swiftkit.data.trainable import HostBatch, Trainable

__all__ = [
    "AnswerBatch",
    "AnswerRow",
    "ChatTemplate",
    "Completion",
    "Conversation",
    "DataReport",
    "Document",
    "HostBatch",
    "Message",
    "Origin",
    "PackedBatch",
    "Pairs",
    "PlainText",
    "Prepared",
    "Renderer",
    "Row",
    "RowError",
    "Trainable",
    "collate",
    "collate_answers",
    "num_steps",
    "pack",
    "prepare",
    "prepare_pairs",
    "read",
    "resolve_chat_template",
    "to_example",
    "windows_of_run",
    "windows_of_step",
]
