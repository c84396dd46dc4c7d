"""Every knob once: type, default, unit and help. Flags, YAML files and Python share this schema."""

from swiftkit.config.build import ConfigT as ConfigT
from swiftkit.config.build import build as build
from swiftkit.config.build import canonical as canonical
from swiftkit.config.build import unknown as unknown
from swiftkit.config.data import DataKnobs as DataKnobs
from swiftkit.config.data import RowKnobs as RowKnobs
from swiftkit.config.data import RowLossKnobs as RowLossKnobs
from swiftkit.config.data import WindowKnobs as WindowKnobs
from swiftkit.config.schema import Auto as Auto
from swiftkit.config.schema import Config as Config
from swiftkit.config.schema import Many as Many
from swiftkit.config.schema import knob as knob
from swiftkit.config.training import LoraKnobs as LoraKnobs
from swiftkit.config.training import ModelKnobs as ModelKnobs
from swiftkit.config.training import TrainKnobs as TrainKnobs
from swiftkit.config.verbs import ChatConfig as ChatConfig
from swiftkit.config.verbs import DownloadConfig as DownloadConfig
from swiftkit.config.verbs import EvalConfig as EvalConfig
from swiftkit.config.verbs import MergeConfig as MergeConfig
from swiftkit.config.verbs import PreviewConfig as PreviewConfig
from swiftkit.config.verbs import QuantizeConfig as QuantizeConfig
from swiftkit.config.verbs import ReadyModelKnobs as ReadyModelKnobs
from swiftkit.config.verbs import ReportConfig as ReportConfig
from swiftkit.config.verbs import SftConfig as SftConfig
from swiftkit.config.verbs import StatsConfig as StatsConfig
from swiftkit.config.verbs import TokenizerKnobs as TokenizerKnobs
