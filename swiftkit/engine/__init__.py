"""The fast model: exchange of modules, linear layers with LoRA, attention plan, loss head."""

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.batch import Batch
from swiftkit.engine.engine import Engine, Loss, Sums
from swiftkit.engine.head import Head
from swiftkit.engine.linear import LoraLinear
from swiftkit.formats.full import FullSpec
from swiftkit.formats.peft import LoraSpec

__all__ = ["AttentionPlan", "Batch", "Engine", "FullSpec", "Head", "LoraLinear", "LoraSpec", "Loss", "Sums"]
