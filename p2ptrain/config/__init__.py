"""The two configurations: `RunConfig`, shared by all nodes of a run and hashed, and `NodeConfig`, private to each node.

Both are TOML files, checked by pydantic. Unknown keys, values of the wrong type and impossible combinations are errors
that name file, key and fix, all at once: a run that ignores a typo is worse than one that does not start.

Decimal numbers are kept as fractions, so that 0.1 means exactly one tenth everywhere.

`run` is the shared config, with its parts `model`, `adapt`, `recipe` and `hf` (a stranger's config.json); `node` is the
private one; `succession` is what a run's successor may have otherwise. `load` reads both from files, environment and
options, `fields` has the types of their values, `text` writes them, and their errors, for people.

`X as X` marks a name as part of this package, for type checkers."""

from __future__ import annotations

from p2ptrain.config.adapt import WHOLE as WHOLE
from p2ptrain.config.adapt import AdaptConfig as AdaptConfig
from p2ptrain.config.fields import Rational as Rational
from p2ptrain.config.fields import Section as Section
from p2ptrain.config.load import exact as exact
from p2ptrain.config.load import load_config as load_config
from p2ptrain.config.load import load_node_config as load_node_config
from p2ptrain.config.load import load_run_config as load_run_config
from p2ptrain.config.load import read_table as read_table
from p2ptrain.config.load import run_config_of as run_config_of
from p2ptrain.config.load import with_options as with_options
from p2ptrain.config.model import MODEL_PRESETS as MODEL_PRESETS
from p2ptrain.config.model import ModelConfig as ModelConfig
from p2ptrain.config.node import DeviceConfig as DeviceConfig
from p2ptrain.config.node import HttpConfig as HttpConfig
from p2ptrain.config.node import LimitsConfig as LimitsConfig
from p2ptrain.config.node import LoggingConfig as LoggingConfig
from p2ptrain.config.node import NetworkConfig as NetworkConfig
from p2ptrain.config.node import NodeConfig as NodeConfig
from p2ptrain.config.node import PrivacyConfig as PrivacyConfig
from p2ptrain.config.node import StorageConfig as StorageConfig
from p2ptrain.config.node import TrackingConfig as TrackingConfig
from p2ptrain.config.recipe import RECIPES as RECIPES
from p2ptrain.config.recipe import RecipeConfig as RecipeConfig
from p2ptrain.config.run import AUDIT_SEQUENCES as AUDIT_SEQUENCES
from p2ptrain.config.run import BASIS_PEAK as BASIS_PEAK
from p2ptrain.config.run import CONFIG_BYTES_MAX as CONFIG_BYTES_MAX
from p2ptrain.config.run import ENDING as ENDING
from p2ptrain.config.run import EXACT_MAX as EXACT_MAX
from p2ptrain.config.run import PAYLOAD_BYTES_MAX as PAYLOAD_BYTES_MAX
from p2ptrain.config.run import PROTOCOL_VERSION as PROTOCOL_VERSION
from p2ptrain.config.run import PROTOCOLS as PROTOCOLS
from p2ptrain.config.run import AdmissionConfig as AdmissionConfig
from p2ptrain.config.run import AgreementConfig as AgreementConfig
from p2ptrain.config.run import DataConfig as DataConfig
from p2ptrain.config.run import RunConfig as RunConfig
from p2ptrain.config.run import StateConfig as StateConfig
from p2ptrain.config.run import TokenizerConfig as TokenizerConfig
from p2ptrain.config.run import WorldConfig as WorldConfig
