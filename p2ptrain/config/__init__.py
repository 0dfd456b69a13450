"""The two configurations: `RunConfig`, shared by all nodes of a run and hashed, and `NodeConfig`, private to each node.

Both are TOML files, checked by pydantic. Unknown keys, values of the wrong type and impossible combinations are errors
that name the file, the key and the fix: a run that ignores a typo is worse than one that does not start. All errors of
a file are reported at once.

Decimal numbers are kept as fractions, so that 0.1 means exactly one tenth everywhere.

`run` is the shared config, with its parts `model`, `adapt`, `recipe` and `hf` (a stranger's config.json); `node` is the
private one. `load` reads both from files, environment and options, `fields` has the types of their values, `text`
writes them, and their errors, for people.
"""

from __future__ import annotations

from p2ptrain.config.adapt import WHOLE, AdaptConfig
from p2ptrain.config.fields import Digest, Rational, Section
from p2ptrain.config.load import (
    exact,
    load_config,
    load_node_config,
    load_run_config,
    read_table,
    run_config_of,
    with_options,
)
from p2ptrain.config.model import MODEL_PRESETS, ModelConfig
from p2ptrain.config.node import (
    DeviceConfig,
    HttpConfig,
    IdentityConfig,
    LimitsConfig,
    LoggingConfig,
    NetworkConfig,
    NodeConfig,
    PrivacyConfig,
    StorageConfig,
    TrackingConfig,
)
from p2ptrain.config.recipe import RECIPES, RecipeConfig, RecipeSpec
from p2ptrain.config.run import (
    BASIS_PEAK,
    CONFIG_BYTES_MAX,
    EXACT_MAX,
    PAYLOAD_BYTES_MAX,
    PROTOCOL_VERSION,
    VOTES_MAX,
    AdmissionConfig,
    AgreementConfig,
    DataConfig,
    RunConfig,
    StateConfig,
    TokenizerConfig,
    WorldConfig,
)

__all__ = [
    "BASIS_PEAK",
    "CONFIG_BYTES_MAX",
    "EXACT_MAX",
    "MODEL_PRESETS",
    "PAYLOAD_BYTES_MAX",
    "PROTOCOL_VERSION",
    "RECIPES",
    "VOTES_MAX",
    "WHOLE",
    "AdaptConfig",
    "AdmissionConfig",
    "AgreementConfig",
    "DataConfig",
    "DeviceConfig",
    "Digest",
    "HttpConfig",
    "IdentityConfig",
    "LimitsConfig",
    "LoggingConfig",
    "ModelConfig",
    "NetworkConfig",
    "NodeConfig",
    "PrivacyConfig",
    "Rational",
    "RecipeConfig",
    "RecipeSpec",
    "RunConfig",
    "Section",
    "StateConfig",
    "StorageConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "WorldConfig",
    "exact",
    "load_config",
    "load_node_config",
    "load_run_config",
    "read_table",
    "run_config_of",
    "with_options",
]
